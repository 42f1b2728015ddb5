"""A script on a folder's files, run by Python inside of an x86 processor that Bochs emulates.

    python benchmarks/bochs_python.py -cpu sapphire_rapids MACHINE SCRIPT FOLDER

Linux boots from memory, runs `python3 SCRIPT FOLDER` on a copy, and sends back what the script wrote: files
into FOLDER, its output and its exit code. That takes half a minute and 2 GiB. Needs `bochs`, `genisoimage`
and `cpio`. MACHINE is a folder of:

- `vmlinuz`: any kernel with a serial console, such as that of Debian's linux-image-cloud-amd64;
- `isolinux.bin` and `ldlinux.c32`, from Debian's isolinux and syslinux-common;
- `root.cpio`: a Debian of amd64 (`debootstrap --variant=minbase --include=python3 bookworm ROOT`) with the
  wheels of openvino and numpy unpacked in `usr/local/lib/python3.11/dist-packages`, packed by
  `cd ROOT && find . -xdev -path ./var -prune -o -print | cpio -o -H newc > ../root.cpio`.

Bochs is configured with --enable-x86-64 --enable-avx --enable-evex --enable-amx --enable-all-optimizations
--with-nogui. AMX is then hidden, since Linux needs XFD for it, which Bochs lacks; Sapphire Rapids has no
fp16 in AMX. The kernel may not use `rep movsb` for short copies (FSRM): it would jump into a copy that it
has removed, because a register that Bochs lacks says that fast strings are off.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

INIT = """#!/bin/sh
mkdir -p /proc /sys /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
cd /job
python3 script folder >stdout 2>stderr
echo $? >code
stty raw </dev/ttyS0
find . -type f -newermt 2000-01-01 | tar czT - | base64 >/dev/ttyS0
echo o >/proc/sysrq-trigger
sleep 1000
"""
"""The first process. The second serial port is the console, the first carries what the script wrote."""

MENU = """default linux
label linux
kernel vmlinuz
append initrd=root.cpio,job.cpio rdinit=/job/init quiet console=ttyS1 \
mitigations=off tsc=reliable random.trust_cpu=on no5lvl clearcpuid=fsrm
"""

SETTINGS = """cpu: model={model}, ips=100000000, reset_on_triple_fault=0, ignore_bad_msrs=1, \
exclude_features="amx,amx_int8,amx_bf16"
memory: guest=2048, host=2048
romimage: file=$BXSHARE/BIOS-bochs-latest
vgaromimage: file=$BXSHARE/VGABIOS-lgpl-latest.bin
ata0-master: type=cdrom, path={folder}/disc.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/made
com2: enabled=1, mode=file, dev={folder}/console
clock: sync=none, time0=utc
log: {folder}/log
panic: action=fatal
info: action=ignore
display_library: nogui
"""


def pack_job(script: Path, given: Path, folder: Path) -> None:
    """The script, its files and the first process, dated before everything that the script writes."""
    job = folder / "root" / "job"
    shutil.copytree(given, job / "folder", copy_function=shutil.copyfile)
    shutil.copyfile(script, job / "script")
    (job / "init").write_text(INIT)
    (job / "init").chmod(0o755)
    names = ["job", *(str(x.relative_to(folder / "root")) for x in sorted(job.rglob("*")))]
    subprocess.run(["touch", "-d", "@0", *names], cwd=folder / "root", check=True)
    with (folder / "job.cpio").open("wb") as out:
        command = ["cpio", "-o", "-H", "newc", "--quiet"]
        subprocess.run(
            command, cwd=folder / "root", input="\n".join(names).encode(), stdout=out, check=True
        )


def write_disc(machine: Path, folder: Path) -> None:
    """A disc to boot from; genisoimage writes into isolinux.bin, so that one is a copy."""
    shutil.copyfile(machine / "isolinux.bin", folder / "isolinux.bin")
    (folder / "isolinux.cfg").write_text(MENU)
    files = [machine / name for name in ("vmlinuz", "root.cpio", "ldlinux.c32")]
    files += [folder / name for name in ("job.cpio", "isolinux.cfg", "isolinux.bin")]
    boot = ["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot"]
    boot += ["-boot-load-size", "4", "-boot-info-table"]
    command = ["genisoimage", "-quiet", "-f", "-R", "-o", folder / "disc.iso", *boot, *files]
    subprocess.run(command, check=True)


def run_machine(model: str, folder: Path) -> tarfile.TarFile:
    """What the script wrote."""
    (folder / "settings").write_text(SETTINGS.format(model=model, folder=folder))
    command = ["bochs", "-q", "-f", folder / "settings"]
    with (folder / "output").open("w") as out:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)
    made = folder / "made"
    if not made.exists():
        logs = [folder / name for name in ("output", "log", "console")]
        ends = [x.read_text(errors="replace")[-1000:] for x in logs if x.exists()]
        raise SystemExit("\n\n".join(["The machine sent nothing.", *ends]))
    return tarfile.open(fileobj=io.BytesIO(base64.b64decode(made.read_bytes())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-cpu", required=True, help="the processor, by its name in Bochs")
    for name in ("machine", "script", "folder"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        work = Path(text)
        pack_job(options.script, options.folder, work)
        write_disc(options.machine, work)
        with run_machine(options.cpu, work) as archive:
            archive.extractall(work / "back", filter="data")
        back = work / "back"
        if (back / "folder").exists():
            shutil.copytree(back / "folder", options.folder, dirs_exist_ok=True)
        sys.stdout.write((back / "stdout").read_text())
        sys.stderr.write((back / "stderr").read_text())
        sys.exit(int((back / "code").read_text()))


if __name__ == "__main__":
    main()
