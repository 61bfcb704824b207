"""Options of the Kubernetes runtime, and how its words are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from primus.config import flags
from primus.config.flags import Positional
from primus.errors import UsageError, did_you_mean

WHAT = "runtime 'kubernetes'"
TargetName = Literal["jobset", "trainjob", "safe"]
Vendor = Literal["amd", "nvidia", "none"]
Count = Annotated[int, Meta(ge=0)]

COMMANDS = {
    "create": "Start a job: create [options] --exp FILE, or create [options] -- <task>.",
    "get": "How a job stands: its pods, their nodes and exit codes, and why it waits.",
    "list": "The jobs that primus started, or all that the server has with --url.",
    "logs": "What node 0 of a job prints, or another one with --rank; --follow, --tail.",
    "delete": "End a job, and remove it with all that was made for it.",
    "nodes": "Nodes: whether they are ready, and their GPUs, all and used.",
    "wait": "Wait for the end of a job; ends with its exit code.",
}
"""What the runtime does by itself."""
OF_A_JOB = ("get", "logs", "delete", "wait")
"""Commands that take the name of a job."""
WHERE = ("command", "job", "url", "target", "token_file", "namespace", "context", "kubeconfig", "workspace", "api")
"""Options of every command."""
OF_COMMANDS = {
    "get": ("workload_id",),
    "list": (),
    "logs": ("workload_id", "rank", "follow", "tail"),
    "delete": ("workload_id", "yes"),
    "nodes": (),
    "wait": ("workload_id", "timeout"),
}
"""Options that the commands besides `create` take as well."""
OF_THE_TASK = ("--exp", "--data_path", "--data-path", "--backend")
"""Options that name the task."""
REFERENCES = ("--secret", "--pull-secret", "--pull_secret")
"""Options whose values name Secrets that exist."""


class Options(Struct, frozen=True, kw_only=True):
    """Run on Kubernetes; `k8s` for short."""

    command: Positional = ""
    """One of create, get, list, logs, delete, nodes, wait; create where a task follows."""
    job: Positional = ""
    """Name or id of the job, for get, logs, delete and wait."""
    # where
    url: str | None = None
    """Primus-SaFE server, such as https://safe.example.org; the job goes there (--target safe)."""
    target: TargetName | None = None
    """Kind of job; jobset, and safe with --url."""
    token_file: str | None = None
    """Primus-SaFE: file with the API key; PRIMUS_SAFE_TOKEN otherwise."""
    namespace: Annotated[str | None, Meta(extra={"short": ("-n",)})] = None
    """Namespace; that of the kubeconfig's context, else default."""
    context: str | None = None
    """Context of the kubeconfig; its current one."""
    kubeconfig: str | None = None
    """Kubeconfig; KUBECONFIG, else ~/.kube/config, else the account of the pod that this runs in."""
    workspace: str | None = None
    """Workspace of Primus-SaFE; elsewhere the same as --namespace."""
    api: Literal["current", "legacy"] = "current"
    """Primus-SaFE: legacy for servers from before 2026."""
    # what
    replica: Annotated[int, Meta(ge=1)] = 1
    """Nodes, one pod on each."""
    gpu: Count = 8
    """GPUs of each node; 0 for none."""
    cpu: str = "96"
    """CPUs of each node; 0 sets no limit."""
    memory: str | None = None
    """Memory of each node, such as 1024Gi."""
    shm: str | None = None
    """Size of /dev/shm, such as 512Gi; as much as the memory limit allows where it is not given."""
    vendor: Vendor | None = None
    """Whose GPUs; amd, and none with --gpu 0."""
    rdma: tuple[str, ...] = ()
    """RESOURCE=N, such as rdma/hca=8; may be repeated."""
    image: str | None = None
    """Container image, which has primus-cli."""
    pull_secret: tuple[str, ...] = ()
    """Secret with the registry's credentials; may be repeated."""
    volume: tuple[str, ...] = ()
    """CLAIM:/path, a volume claim, or /on/node:/path; the first one holds the run folders; may be repeated."""
    entry: str = "primus-cli"
    """primus-cli in the image."""
    workdir: str | None = None
    """Folder in the image where the task starts."""
    name: str | None = None
    """Name of the job; made of the experiment's and the run's id."""
    env: tuple[str, ...] = ()
    """NAME=VALUE, or a NAME that this shell has; secrets become a Secret; may be repeated."""
    hf_token: str | None = None
    """Hugging Face token, HF_TOKEN; better set in the shell, which is passed on."""
    secret: tuple[str, ...] = ()
    """NAME=SECRET/KEY, the variable NAME from a Secret that exists; may be repeated."""
    exp: str | None = None
    """Experiment file; the same as `-- train pretrain --config FILE`."""
    data_path: str | None = None
    """With --exp: folder of the data, where the pods see it."""
    backend: str | None = None
    """With --exp: framework of the trainer."""
    # how
    nodelist: tuple[str, ...] = ()
    """Nodes that may be used, NODE,NODE; may be repeated."""
    exclude: tuple[str, ...] = ()
    """Nodes that must not be used, NODE,NODE; may be repeated."""
    queue: str | None = None
    """Kueue queue that admits the job."""
    priority_class: str | None = None
    """Priority class of the pods."""
    priority: int | None = None
    """Primus-SaFE: 0 to 2."""
    service_account: str | None = None
    """Service account of the pods."""
    host_network: bool = False
    """Use the network of the nodes, as RDMA without a secondary network needs."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 29500
    """Port of the rendezvous on node 0."""
    max_restarts: Count | None = None
    """Restarts of all pods after a failure; preemption does not count. 3 where it is not given."""
    ttl: Count | None = None
    """Seconds that the job is kept after its end."""
    grace: Count = 600
    """Seconds that pods have to save and end when they are asked to."""
    # commands
    workload_id: str | None = None
    """The job of get, logs, delete and wait, as the server calls it."""
    rank: Count | None = None
    """Number of the node whose log is shown; 0 where it is not given."""
    follow: Annotated[bool, Meta(extra={"short": ("-f",)})] = False
    """Logs: go on until the job ends."""
    tail: Count | None = None
    """Logs: the last N lines of each node."""
    timeout: Annotated[float, Meta(ge=0)] | None = None
    """Wait: seconds after which it is given up, with exit code 124."""
    yes: Annotated[bool, Meta(extra={"short": ("-y",)})] = False
    """Delete without asking."""

    @property
    def target_name(self) -> TargetName:
        """The target that is meant."""
        return self.target or ("safe" if self.url else "jobset")

    @property
    def gpu_vendor(self) -> Vendor:
        """Whose GPUs the pods ask for."""
        return "none" if self.gpu == 0 else self.vendor or "amd"

    @property
    def job_id(self) -> str:
        """The job that a command is about; empty where none is named."""
        return self.workload_id or self.job

    @property
    def allowed_nodes(self) -> tuple[str, ...]:
        """Every node of --nodelist, each once."""
        return _split_names(self.nodelist)

    @property
    def usable_nodes(self) -> tuple[str, ...]:
        """Those of them that are not excluded."""
        return tuple(name for name in self.allowed_nodes if name not in self.excluded_nodes)

    @property
    def excluded_nodes(self) -> tuple[str, ...]:
        """Every node of --exclude, each once."""
        return _split_names(self.exclude)


def parse(words: Sequence[str]) -> Options:
    """Read `words`, in which command and job may stand anywhere.

    Raises:
        UsageError: A word is wrong, or options exclude each other.
    """
    options, more = flags.parse_options(Options, _one_each(words), WHAT, extra=True)
    unknown = [word for word in more if word.startswith("-")]
    if unknown:
        flags.parse_options(Options, unknown[:1], WHAT)  # says which option may be meant
    options = _assign_positional_words(options, [word for word in (options.command, options.job, *more) if word])
    _check_options(options)
    return options


def implied(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`words` with a command in front, as the task of --exp without the words that name it; and the task's words.

    Raises:
        UsageError: A word is wrong.
    """
    options = parse(words)
    if options.exp is None:
        commands = [word for word in words if word == options.command]
        return ((options.command, *_remove_word(words, commands[0])) if commands else tuple(words)), ()
    task = ["train", "pretrain", "--config", options.exp]
    task += ["--data_path", options.data_path] if options.data_path is not None else []
    task += ["--framework", options.backend] if options.backend is not None else []
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag not in OF_THE_TASK:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return tuple(kept), tuple(task)


def _remove_word(words: Sequence[str], word: str) -> tuple[str, ...]:
    position = list(words).index(word)
    return (*words[:position], *words[position + 1 :])


def _assign_positional_words(options: Options, typed: list[str]) -> Options:
    """`options` with the words that are no flags in their places."""
    command = typed.pop(0) if typed else ""
    if command and command not in COMMANDS:
        raise UsageError(f"{WHAT}: no command '{command}'", did_you_mean(command, COMMANDS))
    job = typed.pop(0) if typed and command in OF_A_JOB else ""
    if typed:
        raise UsageError(f"{WHAT}: unexpected word '{typed[0]}'", "separate runtimes and task by ' -- '")
    return structs.replace(options, command=command, job=job)


def _one_each(words: Sequence[str]) -> list[str]:
    """`words` with each option that may be repeated tied to its value: it takes one, whatever that begins with."""
    lists = {name for flag in flags.list_flags(Options) if flag.is_list for name in flag.names}
    tied: list[str] = []
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if word in lists else None
        tied.append(word if value is None else f"{word}={value}")
    return tied


def _split_names(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for word in words for name in word.split(",") if name.strip()))


def takes(words: Sequence[str], name: str) -> bool:
    """Whether the command in `words` takes the option `name`, which a launcher file has for whatever takes it."""
    command = next((word for word in words if word in COMMANDS), "create")
    return _is_taken(command, name.removeprefix("--").replace("-", "_"))


def _check_command(options: Options) -> None:
    """Refuse options of another command than the one that is given."""
    command = options.command or "create"
    for field in structs.fields(Options):
        if getattr(options, field.name) != field.default and not _is_taken(command, field.name):
            raise UsageError(f"{WHAT}: {command} takes no --{field.name.replace('_', '-')}", "leave it out")


def _is_taken(command: str, field: str) -> bool:
    others = {name for names in OF_COMMANDS.values() for name in names}
    return field in WHERE or (field not in others if command == "create" else field in OF_COMMANDS[command])


def _check_options(options: Options) -> None:
    """Refuse what cannot be meant."""
    _check_command(options)
    if options.url and options.target_name != "safe":
        raise UsageError(f"--url is a Primus-SaFE server, and --target {options.target} is not", "leave one out")
    if options.target_name == "safe" and not options.url:
        raise UsageError("--target safe needs --url", "--url https://SERVER")
    for name in ("nodelist", "exclude"):
        if getattr(options, name) and not _split_names(getattr(options, name)):
            raise UsageError(f"{WHAT}: --{name} names no node", f"--{name} NODE,NODE")
    if options.nodelist and len(options.usable_nodes) < options.replica:
        usable = f"{len(options.usable_nodes)} nodes of --nodelist"
        raise UsageError(f"{WHAT}: --replica {options.replica} on {usable}", "name at least as many nodes")
    of_the_task = [name for name in ("data_path", "backend") if getattr(options, name) is not None]
    if of_the_task and options.exp is None:
        raise UsageError(f"{WHAT}: --{of_the_task[0]} goes with --exp", "give it to the task, after ' -- '")
    if options.workload_id and options.job and options.workload_id != options.job:
        raise UsageError(f"{WHAT}: '{options.job}' and --workload-id {options.workload_id} are two jobs")
