"""Signatures of a node: its memory, disks, limits and software."""

from __future__ import annotations

from primus.diagnosis.signature import Signature, SignaturePattern, signs

SHARED_MEMORY = r"(/dev/shm|shm_open|posix_fallocate|shared memory|</torch_\d+_)"
"""What a line with "No space left on device" also names where /dev/shm is full. `</torch_1_2_3>` is a file of
torch's shared tensors (pytorch/pytorch#5040)."""

LIBRARY_NEEDED = r"^(?!.*(NCCL INFO|NCCL WARN|error while loading|dso_loader|Could not load dynamic library))"
"""Not the words of NCCL and TensorFlow, which look for libraries that they can do without."""

SIGNATURES = (
    Signature(
        name="host-out-of-memory",
        role="root",
        action="stop",
        first_action="retry",
        signs=(
            SignaturePattern("oom_kill event", r"Detected \d+ oom_kill event"),
            SignaturePattern("oom-kill event", r"Detected \d+ oom-kill event"),
            *signs(": Out Of Memory", "OOMKilled", "Some of your processes may have been killed by the cgroup"),
            SignaturePattern(
                "ut of memory: Kill process ", r"out of memory: Kill process \d+|Out of memory: Kill process \d+"
            ),
            SignaturePattern("out of memory: Killed process"),
            SignaturePattern("Out of memory: Killed process"),
            SignaturePattern("by the kernel's out-of-memory killer"),  # as `launch.execute` reads its counters
            *signs("invoked oom-killer", "oom_reaper: reaped process", "The node was low on resource: memory"),
            *signs("std::bad_alloc", "Exceeded job memory limit", "oom-kill:constraint="),
            SignaturePattern("exceeded memory limit", r"exceeded memory limit \("),
            SignaturePattern("Unable to allocate ", r"MemoryError: Unable to allocate [\d.]+ [KMGTP]iB"),
            *signs("due to the node running low on memory", "dup2: Cannot allocate memory"),
            SignaturePattern("DefaultCPUAllocator: ", r"(can't|not enough) (allocate )?memory"),
            SignaturePattern("MemoryError", r"(^|[\s:\]])MemoryError(?!: Unable to allocate [\d.]+ [KMGTP]iB)(:|$)"),
        ),
        systems=("any", "Slurm", "Kubernetes"),
        cause="the host ran out of memory, and the kernel killed a process",
        fix="ask for all of the node's memory (slurm ... --mem=0), use fewer --num_workers and --async_save false",
        source="nextflow-io/nextflow#5932; Linux mm/oom_kill.c",
    ),
    Signature(
        name="shared-memory-too-small",
        role="root",
        action="stop",
        signs=(
            SignaturePattern("DataLoader worker (pid", r"killed by signal: Bus error"),
            *signs("insufficient shared memory (shm)"),
            SignaturePattern("Error while creating shared memory segment"),
            SignaturePattern("No space left on device", SHARED_MEMORY),
            SignaturePattern("unable to write to file", r"unable to write to file </torch_\w+>(?!.*No space left)"),
            SignaturePattern(
                "unable to open shared memory object", r"shared memory object </torch_\w+>(?!.*Too many open files)"
            ),
            SignaturePattern(
                "unable to mmap", r"unable to mmap \d+ bytes from file </torch_\w+>: Cannot allocate memory"
            ),
        ),
        systems=("containers", "Kubernetes"),
        cause="the shared memory (/dev/shm) is too small",
        fix="container --ipc host, or --shm-size 64g; in a pod, a memory volume at /dev/shm",
        source="pytorch/pytorch#5040",
    ),
    Signature(
        name="disk-full",
        role="root",
        action="stop",
        signs=(
            SignaturePattern("No space left on device", rf"^(?!.*({SHARED_MEMORY}|/sys/fs/cgroup|xcgroup_))"),
            SignaturePattern("no space left on device", r"^(?!.*/dev/shm)"),
            *signs("Disk quota exceeded", "[Errno 122]", "no space left: it needs"),
            *signs("The node was low on resource: ephemeral-storage", "ephemeral local storage usage exceeds"),
            *signs("PytorchStreamWriter failed writing file"),
            SignaturePattern("unexpected pos ", r"unexpected pos \d+ vs \d+"),
        ),
        cause="a disk is full, or a quota is used up",
        fix="free space: delete runs and checkpoints (`direct -- runs clean --failed --keep 3`), or set --keep_last_n",
        source="NVIDIA/Megatron-LM#878",
    ),
    Signature(
        name="too-many-open-files",
        role="root",
        action="stop",
        signs=signs("Too many open files", "[Errno 24]", "received 0 items of ancdata"),
        cause="a process may not open more files",
        fix="ulimit -n 1048576 before the start; with many data workers, torch's sharing strategy file_system",
        source="well-known; pytorch/pytorch#973",
    ),
    Signature(
        name="too-many-processes",
        role="root",
        action="stop",
        signs=(
            *signs("can't start new thread", "fork: retry: Resource temporarily unavailable"),
            *signs("pthread_create() failed", "pthread_create failed for thread"),
            *signs("Thread creation failed: Resource temporarily", "fork: Resource temporarily unavailable"),
            SignaturePattern("[Errno 11]", r"BlockingIOError: \[Errno 11\] Resource temporarily unavailable"),
        ),
        cause="the limit of processes or threads is reached",
        fix="raise ulimit -u, or the pids limit of the container (--pids-limit -1); use fewer --num_workers",
        source="well-known; OpenMathLib/OpenBLAS blas_server.c",
    ),
    Signature(
        name="stale-file-handle",
        role="root",
        action="retry",
        signs=signs("Stale file handle", "[Errno 116]", "Stale NFS file handle"),
        systems=("NFS",),
        cause="a network file system lost a file that was open",
        fix="remount it; if it comes again on this node, leave the node out (--exclude)",
        source="well-known",
    ),
    Signature(
        name="file-system-error",
        role="root",
        action="exclude",
        signs=(
            *signs("[Errno 5] Input/output error", "Transport endpoint is not connected", "[Errno 121] Remote I/O"),
            *signs("Cannot send after transport endpoint shutdown", "[Errno 112] Host is down", "No locks available"),
            *signs("[Errno 14] Bad address", "[Errno 19] No such device", "Structure needs cleaning"),
        ),
        systems=("NFS", "any"),
        cause="a file system of the node does not work",
        fix="look at the node's mounts: `direct -- preflight --host` writes to each of them",
        source="errno(3): EIO, ENOTCONN, EREMOTEIO, ESHUTDOWN, ENOLCK",
    ),
    Signature(
        name="permission-denied",
        role="root",
        action="stop",
        strength="likely",
        signs=(
            *signs("PermissionError: [Errno 13]", "PermissionError: [Errno 1]", "OSError: [Errno 30] Read-only file"),
            SignaturePattern(
                ": Permission denied", r"^(?!.*([Ww]arning|/dev/kfd|/dev/dri|ssh)).*: Permission denied\s*$"
            ),
            SignaturePattern("cannot create directory", r"mkdir: cannot create directory .*: (Permission|Read-only)"),
        ),
        cause="a file may not be read or written",
        fix="look at the owner and the mode of the file, and at the user of the container",
        source="errno(3): EACCES, EPERM, EROFS",
    ),
    Signature(
        name="software-mismatch",
        role="root",
        action="stop",
        signs=(
            *signs("ModuleNotFoundError: ", "undefined symbol: "),
            SignaturePattern("cannot open shared object file", LIBRARY_NEEDED),
            SignaturePattern("ImportError: ", r"ImportError: (cannot import name|/|lib|DLL|numpy\.)"),
            SignaturePattern(
                "ImportError: ",
                r"ImportError: .*\b(is required|requires? the|not installed|pip install|but was not found)",
            ),
            *signs("error while loading shared libraries: ", "PackageNotFoundError: ", "DistributionNotFound: "),
            SignaturePattern("' not found (required by", r"version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found"),
        ),
        cause="a library is missing, or was built for another version",
        fix="image and environment do not match: compare packages.txt of the run (`direct -- runs diff`), or use "
        "`./primus-cli setup`",
        source="well-known; ld.so(8)",
    ),
    Signature(
        name="jit-lock",
        role="root",
        action="retry",
        strength="likely",
        signs=signs("waiting for baton release at", "Timed out waiting for lock on compile cache"),
        systems=("AMD",),
        cause="a process waits for a lock of a compilation that another one left behind",
        fix="delete the lock that the line names; give each node its own cache folder",
        source="ROCm/aiter#1162; sgl-project/sglang#16242",
    ),
    Signature(
        name="command-not-found",
        role="root",
        action="stop",
        signs=(
            SignaturePattern("command not found", r": command not found\s*$"),
            *signs("executable file not found in $PATH"),
            SignaturePattern(": not found", r"(sh|bash|dash): \d+: .*: not found\s*$"),
        ),
        exit_codes=(127,),
        cause="a program is not there",
        fix="install it in the image, or check PATH inside: `<runtime> -- env show`",
        source="POSIX shell, exit status 127",
    ),
)
