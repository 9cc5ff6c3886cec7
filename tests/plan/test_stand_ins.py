"""Stub libraries, loaded by the system's loader and compared with libraries that the C compiler builds."""

from __future__ import annotations

import ctypes
import pathlib
import platform
import shutil
import subprocess
import sys

import pytest

from meshtune.plan.compilers.stand_ins import NO_DEVICE, build_stand_ins, library_folders, read, stand_in

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="stand-ins are for x86-64 Linux, as ROCm is"
)
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make something to stand in for")


def cc(*arguments: object) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", *map(str, arguments)], check=True)


def call_library(path: pathlib.Path, folder: pathlib.Path, *functions: str) -> list[int]:
    """The return values of a library's functions in a process whose loader also searches `folder`."""
    calls = ", ".join(f"lib.{name}()" for name in functions)
    # Every name is resolved at once, as Python's own dlopen of an extension module may.
    code = f"import ctypes, os; lib = ctypes.CDLL({str(path)!r}, os.RTLD_NOW); print([{calls}])"
    env = {"LD_LIBRARY_PATH": str(folder), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    return [int(value) for value in ran.stdout.strip("[]\n").split(",")]


def test_every_function_of_a_loaded_stub_returns_the_code(tmp_path):
    names = {"plain": None, "old": "V_1", "new": "V_2"} | {f"f{n}": None for n in range(500)}
    (tmp_path / "libmine.so.3").write_bytes(stand_in("libmine.so.3", names, ["V_3"], 77))
    lib = ctypes.CDLL(str(tmp_path / "libmine.so.3"))
    assert [getattr(lib, name)() for name in names] == [77] * len(names)
    with pytest.raises(AttributeError):
        _ = lib.absent


@needs_cc
def test_imported_and_exported_symbols_are_read_as_linked(tmp_path):
    (tmp_path / "map").write_text("LIB_2.0 { global: given; local: *; };\n")
    (tmp_path / "given.c").write_text("int given(void) { return 3; } int hidden(void) { return 4; }\n")
    cc("-o", tmp_path / "libgiven.so.2", tmp_path / "given.c", "-Wl,-soname,libgiven.so.2",
       f"-Wl,--version-script={tmp_path}/map")  # fmt: skip
    (tmp_path / "user.c").write_text(
        "extern int given(void); extern int from_anywhere(void); __attribute__((weak)) int perhaps(void);\n"
        "int user(void) { return given() + from_anywhere() + (perhaps ? perhaps() : 0); }\n"
    )
    cc("-o", tmp_path / "libuser.so", tmp_path / "user.c", tmp_path / "libgiven.so.2", "-Wl,-rpath,$ORIGIN/beside")
    library, user = read(tmp_path / "libgiven.so.2"), read(tmp_path / "libuser.so")
    assert "given" in library.defined
    assert "hidden" not in library.defined
    assert "libgiven.so.2" in user.needed
    assert user.paths == [tmp_path.resolve() / "beside"]
    assert user.undefined["given"] == ("libgiven.so.2", "LIB_2.0")
    assert user.undefined["from_anywhere"] is None
    assert "perhaps" not in user.undefined


@needs_cc
def test_a_library_whose_libraries_are_missing_loads_with_their_stand_ins(tmp_path):
    """One exports a versioned symbol, one an unversioned symbol; an installed library is not replaced."""
    installed, missing = tmp_path / "installed", tmp_path / "missing"
    installed.mkdir()
    missing.mkdir()
    (tmp_path / "map").write_text("HIP_7.0 { global: versioned; };\n")
    for name, body in (("versioned", "1"), ("plain", "2"), ("kept", "5")):
        (tmp_path / f"{name}.c").write_text(f"int {name}(void) {{ return {body}; }}\n")
    cc("-o", missing / "libversioned.so.7", tmp_path / "versioned.c", "-Wl,-soname,libversioned.so.7",
       f"-Wl,--version-script={tmp_path}/map")  # fmt: skip
    cc("-o", missing / "libplain.so.1", tmp_path / "plain.c", "-Wl,-soname,libplain.so.1")
    cc("-o", installed / "libkept.so.1", tmp_path / "kept.c", "-Wl,-soname,libkept.so.1")
    (tmp_path / "user.c").write_text(
        "int versioned(void), plain(void), kept(void);\n"
        "int a(void) { return versioned(); } int b(void) { return plain(); } int c(void) { return kept(); }\n"
    )
    user = tmp_path / "libuser.so"
    cc("-o", user, tmp_path / "user.c", *missing.iterdir(), *installed.iterdir(), f"-Wl,-rpath,{installed}")
    assert call_library(user, missing, "a", "b", "c") == [1, 2, 5]
    folder = build_stand_ins([user], tmp_path / "cache", library_folders({}))
    assert folder is not None
    assert sorted(path.name for path in folder.iterdir()) == ["libplain.so.1", "libversioned.so.7"]
    assert call_library(user, folder, "a", "b", "c") == [NO_DEVICE, NO_DEVICE, 5]
    # Built once.
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert build_stand_ins([user], tmp_path / "cache", library_folders({})) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first
    # An installed library gets a stub where the caller says so.
    replaced = build_stand_ins([user], tmp_path / "cache", library_folders({}), ["libkept.so.1", "libother.so.1"])
    assert replaced is not None
    assert sorted(path.name for path in replaced.iterdir()) == ["libkept.so.1", "libplain.so.1", "libversioned.so.7"]


@needs_cc
def test_no_stub_is_built_where_no_library_is_missing(tmp_path):
    (tmp_path / "alone.c").write_text("int alone(void) { return 1; }\n")
    cc("-o", tmp_path / "libalone.so", tmp_path / "alone.c")
    assert build_stand_ins([tmp_path / "libalone.so"], tmp_path / "cache", library_folders({})) is None
    assert not (tmp_path / "cache").exists()


def test_a_file_that_is_not_a_shared_object_is_refused(tmp_path):
    (tmp_path / "text.so").write_text("no ELF at all, but long enough to be mapped into memory")
    with pytest.raises(ValueError, match=r"text\.so"):
        read(tmp_path / "text.so")
