"""Signatures of programs and their libraries: calls that fail, code that does not fit, parts that are not built."""

from __future__ import annotations

from primus.diagnosis.signature import Signature, SignaturePattern, signs

SIGNATURES = (
    Signature(
        name="gpu-library-failed",
        role="root",
        action="stop",
        strength="likely",
        signs=(
            SignaturePattern(
                "CUDNN_STATUS_", r"cuDNN.*CUDNN_STATUS_|CUDNN_STATUS_\w*(FAILED|ERROR|NOT_|MISMATCH|BAD_)"
            ),
            SignaturePattern("CUBLAS_STATUS_", r"CUBLAS_STATUS_(?!ALLOC_FAILED|SUCCESS)\w+"),
            SignaturePattern("HIPBLAS_STATUS_", r"HIPBLAS_STATUS_(?!ALLOC_FAILED|SUCCESS)\w+"),
            SignaturePattern("CUSOLVER_STATUS_", r"CUSOLVER_STATUS_(?!SUCCESS)\w+"),
            *signs(
                "CUFFT_INTERNAL_ERROR", "RuntimeError: miopenStatus", "MIOpen Error: ", "rocblas_status_internal_error"
            ),
            *signs("Unable to find a valid cuDNN algorithm", "unable to find an engine to execute this computation"),
            SignaturePattern("cuDNN Error", r"cuDNN Error: |CUDNN_BACKEND\w+.*failed"),
            SignaturePattern("cuBLAS Error", r"cuBLAS Error: "),
        ),
        systems=("AMD", "NVIDIA"),
        cause="a GPU library (cuDNN, cuBLAS, MIOpen, hipBLASLt) could not execute an operation",
        fix="most often too little free device memory, or a library that does not fit PyTorch or the GPU: try "
        "--micro_batch_size 1, and compare LD_LIBRARY_PATH and the versions (`direct -- env show`); MIOpen needs a "
        "folder to write to (--env MIOPEN_USER_DB_PATH=/tmp/miopen)",
        source="ROCm/MIOpen#1994; pytorch/pytorch#60477; docs.nvidia.com/deeplearning/cudnn",
    ),
    Signature(
        name="gpu-call-failed",
        role="root",
        action="retry",
        strength="likely",
        signs=(
            SignaturePattern(
                "CUDA error: ",
                r"CUDA error: (unknown error|invalid argument|initialization error|invalid configuration"
                r"|invalid resource|operation not (supported|permitted)|too many resources"
                r"|OS call failed|invalid value|named symbol)",
            ),
            SignaturePattern(
                "HIP error: ", r"HIP error: (?!out of memory|invalid device (function|ordinal)|an illegal|unspecified)"
            ),
            SignaturePattern("HIP failure", r"HIP failure: '(?!out of memory)"),
            SignaturePattern("Cuda failure", r"Cuda failure( \d+)? '(?!out of memory|peer access)"),
        ),
        systems=("AMD", "NVIDIA"),
        cause="a call to the GPU's runtime failed, and its message does not say why",
        fix="--env CUDA_LAUNCH_BLOCKING=1 (AMD: AMD_SERIALIZE_KERNEL=3) shows the operation; `direct -- preflight "
        "--gpu` tests the device, diagnose --kernel-log shows what the driver says",
        source="docs.nvidia.com/cuda/cuda-runtime-api; lm-sys/FastChat#1654",
    ),
    Signature(
        name="gpu-peer-access",
        role="root",
        action="stop",
        signs=(
            SignaturePattern("hipIpc", r"hipIpc(Get|Open)MemHandle failed"),
            SignaturePattern("cudaIpc", r"cudaIpc(Get|Open)MemHandle failed"),
            *signs("failed to open CUDA IPC handle", "peer access is not supported between these two devices"),
        ),
        systems=("AMD", "NVIDIA", "containers"),
        cause="two GPUs of a node cannot reach each other's memory",
        fix="container --ipc host; --env NCCL_P2P_DISABLE=1 trains without it; look at the IOMMU (iommu=pt) and at "
        "CUDA_VISIBLE_DEVICES, which has to be the same for all ranks",
        source="ROCm/rccl#2188; hiyouga/EasyR1#579",
    ),
    Signature(
        name="gpu-used-twice",
        role="root",
        action="stop",
        signs=signs("Duplicate GPU detected"),
        systems=("AMD", "NVIDIA"),
        cause="two ranks use the same GPU",
        fix="start no more processes than GPUs on a node (--nproc), and let each take the device of its local rank",
        source="NVIDIA/Megatron-LM#661; huggingface/accelerate#2246",
    ),
    Signature(
        name="gpu-used-before-fork",
        role="root",
        action="stop",
        signs=signs("in forked subprocess"),
        systems=("AMD", "NVIDIA"),
        cause="a process uses the GPU that was forked from one which used it before",
        fix="start data workers with the method `spawn`, or keep the GPU out of the data set's code",
        source="pytorch/pytorch torch/cuda/__init__.py",
    ),
    Signature(
        name="device-lacks-feature",
        role="root",
        action="stop",
        signs=(
            *signs("only supports Ampere GPUs or newer", "FlashAttention only support fp16 and bf16 data type"),
            SignaturePattern(
                "compute capability", r"(only supported on|required for|requires|at least).*compute capability"
            ),
            SignaturePattern("compute capability", r"Device compute capability [\d.]+ or higher required"),
            SignaturePattern("Your setup doesn't support bf", r"doesn't support bf16/gpu"),
            SignaturePattern("not supported on this device", r"(FP8|fp8|bf16|BF16).*not supported on this device"),
        ),
        systems=("AMD", "NVIDIA"),
        cause="the GPU or its software lacks what the configuration asks for: a number format or a kernel",
        fix="choose another precision or attention, or nodes with newer GPUs",
        source="Dao-AILab/flash-attention; huggingface/transformers training_args.py",
    ),
    Signature(
        name="extension-not-built",
        role="root",
        action="stop",
        signs=(
            *signs("Error building extension '", "Failed to compile the C++ dataset helper functions"),
            *signs("Ninja is required to load C++ extensions", "CUDA_HOME does not exist, unable to compile"),
            *signs("CUDA_HOME environment variable is not set", "Error compiling objects for extension"),
            *signs("CUDAMismatchException", "mismatches the version that was used to compile"),
        ),
        cause="a part in C++ or for the GPU could not be compiled at the start",
        fix="the compiler's first error stands before it; install compiler, ninja, pybind11 and the headers of Python "
        "and of CUDA or ROCm in the image, or an image that has the part built",
        source="pytorch/pytorch torch/utils/cpp_extension.py; NVIDIA/Megatron-LM#807",
    ),
    Signature(
        name="interface-changed",
        role="root",
        action="stop",
        strength="likely",
        signs=(
            SignaturePattern("AttributeError: module ", r"AttributeError: module '[\w.]+' has no attribute"),
            SignaturePattern("got an unexpected keyword argument", r"TypeError: .*got an unexpected keyword argument"),
            SignaturePattern("required positional argument", r"TypeError: .*missing \d+ required positional argument"),
            *signs("Transformers does not recognize this architecture", "numpy.dtype size changed"),
            SignaturePattern("A module that was compiled using NumPy"),
            SignaturePattern("Detected that PyTorch and ", r"were compiled with different CUDA versions"),
            SignaturePattern("is required for a normal functioning of this module"),
            SignaturePattern(
                "AttributeError: ",
                r"AttributeError: '\w*(Config|Args|Arguments|Tokenizer|TokenizerFast|Cache)' object "
                r"has no attribute",
            ),
            *signs("Torch not compiled with CUDA enabled"),
            SignaturePattern("operator ", r"RuntimeError: operator \w+::\w+ does not exist"),
        ),
        cause="a program and a library of another version do not fit together",
        fix="install the versions that the program names: compare packages.txt of the run (`direct -- runs diff`)",
        source="docs.python.org/3/library/exceptions.html; huggingface/transformers",
    ),
    Signature(
        name="gradient-not-defined",
        role="root",
        action="stop",
        signs=(
            *signs("has been modified by an inplace operation", "does not require grad and does not have a grad_fn"),
            *signs(
                "Trying to backward through the graph a second time",
                "None of the inputs have requires_grad=True. Gradients will be None, error",
            ),
            *signs("tensors used as indices must be long", "optimizer got an empty parameter list"),
            *signs("Attempting to unscale FP", "No inf checks were recorded for this optimizer"),
        ),
        cause="the model's code leaves no way to compute a gradient",
        fix="correct it where the traceback points; the same would come again",
        source="pytorch/pytorch torch/csrc/autograd",
    ),
    Signature(
        name="unused-parameters",
        role="root",
        action="stop",
        signs=(
            *signs(
                "Expected to have finished reduction in the prior iteration", "Expected to mark a variable ready only"
            ),
        ),
        cause="parameters took no part in a step, or twice, and the ranks wait for their gradients",
        fix="find_unused_parameters of DistributedDataParallel, or freeze what is not trained; with activation "
        "checkpointing, the variant without re-entrance",
        source="pytorch/pytorch#43259; torch/csrc/distributed/c10d/reducer.cpp",
    ),
    Signature(
        name="collectives-differ",
        role="root",
        action="stop",
        signs=(
            *signs("Detected mismatch between collectives on ranks", "DDP expects same model across all ranks"),
            SignaturePattern("Message truncated : ", r"Message truncated : received \d+ bytes instead of \d+"),
            SignaturePattern(
                "appears not to match", r"params\[\d+\] in this process with sizes .* appears not to match"
            ),
            *signs("Mismatched collective", "Collectives differ in the following aspects"),
        ),
        cause="ranks called different collectives, or with tensors of different sizes",
        fix="all ranks need the same code, configuration and number of steps; --env TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "names the first difference",
        source="pytorch/pytorch ProcessGroupWrapper.cpp; NVIDIA/nccl src/transport/net_socket.cc",
    ),
    Signature(
        name="tracker-refused",
        role="root",
        action="stop",
        strength="likely",
        signs=signs("api_key not configured (no-tty)", "wandb.errors.", "wandb: ERROR "),
        cause="the service that records the experiment refuses or cannot be reached",
        fix="export its key and pass it on by name (--env WANDB_API_KEY), or record offline: --env WANDB_MODE=offline",
        source="docs.wandb.ai",
    ),
    Signature(
        name="mpi-not-started",
        role="root",
        action="stop",
        strength="likely",
        signs=(
            *signs("MPI_INIT failed for some reason", "There are not enough slots available in the system"),
            *signs("PMI2_Init failed to intialize", "was unable to reliably start one or more daemons"),
            *signs("has detected an attempt to run as root", "PML add procs failed", "An error occurred in MPI_Init"),
        ),
        systems=("Slurm", "any"),
        cause="MPI could not start its processes",
        fix="srun needs the --mpi that the library was built for (srun --mpi=list); mpirun needs slots and hosts",
        source="open-mpi.org; slurm.schedmd.com/mpi_guide.html",
    ),
)
