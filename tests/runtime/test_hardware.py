import platform
from pathlib import Path

import pytest

from transferry.runtime.hardware import cpu_name, instruction_sets, usable_cores


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "processor : 0\nflags\t\t: fpu avx2 fma avx512_vnni\n\nflags : avx2\n",
            ("avx2", "fma", "avx512_vnni"),
        ),
        ("Features\t: fp asimd asimddp i8mm\n", ("asimddp", "i8mm")),
        (None, ()),
    ],
)
def test_reads_the_instruction_sets_of_x86_and_arm(
    text: str | None, found: tuple[str, ...], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert instruction_sets(tmp_path / "cpuinfo") == found


def test_counts_at_least_one_core() -> None:
    assert usable_cores() >= 1


def test_names_the_cpu_or_the_machine_type(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Xeon(R) @ 2.0: GHz\nmodel name : other\n")
    assert cpu_name(cpuinfo) == "Xeon(R) @ 2.0: GHz"
    cpuinfo.write_text("Features\t: fp\n")
    assert cpu_name(cpuinfo) == platform.machine()
    cpuinfo.unlink()
    assert cpu_name(cpuinfo) == platform.machine()
