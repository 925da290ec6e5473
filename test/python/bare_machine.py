"""A root file system like that of a machine with a GPU and PyTorch, without Debian's development packages. It holds the C and
C++ libraries, a shell and its tools, and Python. It has no MPI, and only those parts of CUDA that a test adds."""

import pathlib
import shutil
import subprocess
import sysconfig

TOOLS = ["bash", "sh", "awk", "basename", "cat", "cp", "dirname", "env", "grep", "ls", "mkdir", "readlink", "rm", "sed", "sleep", "sort", "timeout",
         "tr", "uname", "ldconfig"]
PYTHON = pathlib.Path("/usr/bin/python3")  # the system's, whose modules are in folders of the system
PACKAGES = pathlib.Path("/usr/lib/python3/dist-packages")


def why_not():
    """The reason why this machine can make no bare machine; empty if it can."""
    if not PYTHON.exists():
        return f"{PYTHON} is not here"
    tried = subprocess.run(["unshare", "--map-root-user", "--mount", "chroot", "/", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"unshare cannot make a mount namespace here: {tried.stderr.strip()}"


class BareMachine:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.shown = {}  # {path in the bare machine: path in the real machine}
        for folder in ("proc", "dev", "tmp", "etc", "root"):
            (self.root / folder).mkdir(parents=True)
        for folder in ("bin", "sbin", "lib", "lib64"):
            (self.root / "usr" / folder).mkdir(parents=True)
            (self.root / folder).symlink_to(f"usr/{folder}")
        for tool in TOOLS:
            self.copy_program(shutil.which(tool, path="/bin:/usr/bin:/sbin:/usr/sbin"), f"/bin/{tool}")
        self.copy_program(PYTHON.resolve(), "/usr/bin/python3")
        version = subprocess.run([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"], capture_output=True,
                                 text=True, check=True).stdout.strip()
        self.show(version)
        for module in pathlib.Path(version, "lib-dynload").glob("*.so"):
            self.copy_libraries(module)
        # The C library's parts, and libraries that every C++ program such as PyTorch needs.
        for library in ("libm.so.6", "librt.so.1", "libdl.so.2", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1"):
            self.copy_library(subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True,
                                             check=True).stdout.strip())

    def copy_program(self, path, to):
        shutil.copy(path, self.root / to.lstrip("/"))
        self.copy_libraries(path)

    def copy_libraries(self, path):
        listed = subprocess.run(["ldd", path], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            words = [word for word in line.split() if word.startswith("/")]
            if words:
                self.copy_library(words[0])

    def copy_library(self, path):
        """Copies a library to its own place, under the name that programs ask for."""
        to = self.root / str(path).lstrip("/")
        if not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
        name = self.root / "lib" / sysconfig.get_config_var("MULTIARCH") / pathlib.Path(path).name
        if not name.exists():
            name.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, name)

    def show(self, path, at=None):
        """Makes the machine's own file or folder visible, at the same place or another."""
        to = self.root / str(at or path).lstrip("/")
        if pathlib.Path(path).is_dir():
            to.mkdir(parents=True, exist_ok=True)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.touch()
        self.shown[to] = path

    def run(self, command, timeout, **environment):
        """Runs a shell command in it, with only the given variables."""
        mounts = "".join(f"mount --rbind '{path}' '{to}' && " for to, path in
                         [*self.shown.items(), (self.root / "proc", "/proc"), (self.root / "dev", "/dev")])
        variables = [f"{name}={value}" for name, value in ({"PATH": "/bin:/usr/bin", "HOME": "/root"} | environment).items()]
        script = f"{mounts} exec chroot '{self.root}' /bin/env -i \"$@\""
        return subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *variables, "/bin/bash", "-c",
                               command], capture_output=True, text=True, timeout=timeout)
