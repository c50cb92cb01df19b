from pathlib import Path

import pytest

from transferry.runtime import hardware


def test_reads_the_instruction_sets_of_x86_and_arm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "Path", lambda _: cpuinfo)
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 fma avx512_vnni\n\nflags : avx2\n")
    assert hardware.instruction_sets() == ("avx2", "fma", "avx512_vnni")
    cpuinfo.write_text("Features\t: fp asimd asimddp i8mm\n")
    assert hardware.instruction_sets() == ("asimddp", "i8mm")
    cpuinfo.unlink()
    assert hardware.instruction_sets() == ()


def test_counts_at_least_one_core() -> None:
    assert hardware.usable_cores() >= 1


def test_names_the_cpu_or_the_machine_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "Path", lambda _: cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    cpuinfo.write_text("processor : 0\nmodel name\t: Xeon(R) @ 2.0: GHz\nmodel name : other\n")
    assert hardware.cpu_name() == "Xeon(R) @ 2.0: GHz"
    cpuinfo.write_text("Features\t: fp\n")
    assert hardware.cpu_name() == "aarch64"
    cpuinfo.unlink()
    assert hardware.cpu_name() == "aarch64"
