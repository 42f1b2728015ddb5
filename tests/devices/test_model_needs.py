"""What classes of models need whatever the device."""

from __future__ import annotations

from stopdown.devices.model_needs import needs_tiling, read_needs


def test_each_need_has_a_source_and_something_to_do() -> None:
    """A row refuses a format, with what to type, or asks for tiles."""
    needs = read_needs()
    assert needs
    for need in needs:
        assert need.source
        assert need.tiles or (need.refused and need.remedy)


def test_tiles_are_needed_by_the_beginning_of_a_class_name() -> None:
    """A class of no row works without them."""
    tiled = next(need.begins for need in read_needs() if need.tiles)
    assert needs_tiling(f"{tiled}Extra")
    assert not needs_tiling("AutoencoderKL")
    assert not any(needs_tiling(need.begins) for need in read_needs() if not need.tiles)
