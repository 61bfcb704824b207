"""Signatures of a node: its memory, disks, limits and software."""

from __future__ import annotations

from primus.diagnosis.signature import Sign, Signature, signs

SHARED_MEMORY = r"(/dev/shm|shm_open|posix_fallocate|shared memory|</torch_\d+_)"
"""What a line with "No space left on device" also names where /dev/shm is full. `</torch_1_2_3>` is a file of
torch's shared tensors (pytorch/pytorch#5040)."""

SIGNATURES = (
    Signature(
        name="host-out-of-memory",
        role="root",
        action="stop",
        first_action="retry",
        signs=(
            Sign("oom_kill event", r"Detected \d+ oom_kill event"),
            Sign("oom-kill event", r"Detected \d+ oom-kill event"),
            *signs(": Out Of Memory", "OOMKilled", "Some of your processes may have been killed by the cgroup"),
            Sign("out of memory: Killed process"),
            Sign("Out of memory: Killed process"),
            Sign("by the kernel's out-of-memory killer"),  # as `launch.execute` reads its counters
            *signs("invoked oom-killer", "oom_reaper: reaped process", "The node was low on resource: memory"),
            *signs("std::bad_alloc"),
            Sign("DefaultCPUAllocator: ", r"(can't|not enough) (allocate )?memory"),
            Sign("MemoryError", r"(^|[\s:\]])MemoryError(:|$)"),
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
            Sign("DataLoader worker (pid", r"killed by signal: Bus error"),
            *signs("insufficient shared memory (shm)"),
            Sign("Error while creating shared memory segment"),
            Sign("No space left on device", SHARED_MEMORY),
            Sign("unable to mmap", r"unable to mmap \d+ bytes from file </torch_\w+>: Cannot allocate memory"),
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
            Sign("No space left on device", rf"^(?!.*{SHARED_MEMORY})"),
            *signs("Disk quota exceeded", "[Errno 122]", "no space left: it needs"),
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
            Sign("[Errno 11]", r"BlockingIOError: \[Errno 11\] Resource temporarily unavailable"),
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
        ),
        systems=("NFS", "any"),
        cause="a file system of the node does not work",
        fix="look at the node's mounts: `direct -- preflight --host` writes to each of them",
        source="errno(3): EIO, ENOTCONN, EREMOTEIO",
    ),
    Signature(
        name="permission-denied",
        role="root",
        action="stop",
        strength="likely",
        signs=signs("PermissionError: [Errno 13]", "PermissionError: [Errno 1]", "OSError: [Errno 30] Read-only file"),
        cause="a file may not be read or written",
        fix="look at the owner and the mode of the file, and at the user of the container",
        source="errno(3): EACCES, EPERM, EROFS",
    ),
    Signature(
        name="software-mismatch",
        role="root",
        action="stop",
        signs=(
            *signs("ModuleNotFoundError: ", "undefined symbol: ", "cannot open shared object file"),
            Sign("ImportError: ", r"ImportError: (cannot import name|/|lib|DLL)"),
            Sign("' not found (required by", r"version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found"),
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
            Sign("command not found", r": command not found\s*$"),
            *signs("executable file not found in $PATH"),
            Sign(": not found", r"(sh|bash|dash): \d+: .*: not found\s*$"),
        ),
        exit_codes=(127,),
        cause="a program is not there",
        fix="install it in the image, or check PATH inside: `<runtime> -- env show`",
        source="POSIX shell, exit status 127",
    ),
)
