"""What a guard's observer tells of the calls."""

from __future__ import annotations

from stopdown.runtime.session import tell_calls


def test_decoding_is_named_while_it_goes_on() -> None:
    """A call is told of when it is over; after the last step comes decoding, which may take minutes."""
    told: list[tuple[str, str, int, int]] = []
    observe = tell_calls(lambda *said: told.append(said))
    observe("text_encoder", "encode", 0, 0)
    observe("transformer", "denoise", 0, 2)
    observe("transformer", "denoise", 1, 2)
    assert told == [
        ("encode", "text_encoder", 0, 0),
        ("denoise", "transformer", 1, 2),
        ("denoise", "transformer", 2, 2),
        ("decode", "", 0, 0),
    ]
