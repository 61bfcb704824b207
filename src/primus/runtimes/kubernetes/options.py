"""Options of the Kubernetes runtime, and the parsing of its arguments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    "get": "Show a job: state, pods with their nodes and exit codes, and why it is waiting.",
    "list": "List the jobs that primus started; with --url, all jobs of the server.",
    "logs": "Print the log of node 0, or of another node with --rank; --follow, --tail.",
    "delete": "Cancel a job, and delete it with everything that was created for it.",
    "nodes": "List nodes: ready or not, number of GPUs, GPUs in use.",
    "wait": "Wait until a job ends, and exit with its exit code.",
}
"""Commands that need no task."""
JOB_COMMANDS = ("get", "logs", "delete", "wait")
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
"""Further options of the commands except `create`."""
TASK_OPTIONS = ("--exp", "--data_path", "--data-path", "--backend")
"""Options that name the task."""
REFERENCES = ("--secret", "--pull-secret", "--pull_secret")
"""Options whose values name existing Secrets."""


class Options(Struct, frozen=True, kw_only=True):
    """Run on Kubernetes (short name: k8s)."""

    command: Positional = ""
    """create, get, list, logs, delete, nodes or wait (default: create, if a task follows)."""
    job: Positional = ""
    """Name or id of the job, for get, logs, delete and wait."""
    # where
    url: str | None = None
    """Primus-SaFE server to send the job to, for example https://safe.example.org (implies --target safe)."""
    target: TargetName | None = None
    """Kind of job (default: jobset; safe with --url)."""
    token_file: str | None = None
    """Primus-SaFE: file with the API key (default: PRIMUS_SAFE_TOKEN)."""
    namespace: Annotated[str | None, Meta(extra={"short": ("-n",)})] = None
    """Namespace (default: that of the kubeconfig's context, else default)."""
    context: str | None = None
    """Context of the kubeconfig (default: the current one)."""
    kubeconfig: str | None = None
    """Kubeconfig file (default: KUBECONFIG, else ~/.kube/config, else the service account of this pod)."""
    workspace: str | None = None
    """Workspace of Primus-SaFE; for other targets the same as --namespace."""
    api: Literal["current", "legacy"] = "current"
    """Primus-SaFE: use legacy for servers from before 2026."""
    # what
    replica: Annotated[int, Meta(ge=1)] = 1
    """Number of nodes, with one pod on each."""
    gpu: Count = 8
    """GPUs per node; 0 for none."""
    cpu: str = "96"
    """CPUs per node; 0 for no limit."""
    memory: str | None = None
    """Memory per node, for example 1024Gi."""
    shm: str | None = None
    """Size of /dev/shm, for example 512Gi (default: bounded by the memory limit)."""
    vendor: Vendor | None = None
    """Vendor of the GPUs (default: amd; none with --gpu 0)."""
    rdma: tuple[str, ...] = ()
    """RDMA devices per node as RESOURCE=N, for example rdma/hca=8; may be repeated."""
    image: str | None = None
    """Container image that contains primus-cli."""
    pull_secret: tuple[str, ...] = ()
    """Secret with the credentials of the registry; may be repeated."""
    volume: tuple[str, ...] = ()
    """CLAIM:/path for a volume claim, or /on/node:/path; the first one stores the run folders; may be repeated."""
    entry: str = "primus-cli"
    """Path of primus-cli in the image."""
    workdir: str | None = None
    """Folder in the image in which the task starts."""
    name: str | None = None
    """Name of the job (default: the experiment's name and the run's id)."""
    env: tuple[str, ...] = ()
    """Environment variable: NAME=VALUE, or NAME of a variable that is set; secrets become a Secret; may be repeated."""
    hf_token: str | None = None
    """Hugging Face token; prefer to set HF_TOKEN in the shell, which is passed on."""
    secret: tuple[str, ...] = ()
    """NAME=SECRET/KEY sets variable NAME from an existing Secret; may be repeated."""
    exp: str | None = None
    """Experiment file; short for `-- train pretrain --config FILE`."""
    data_path: str | None = None
    """With --exp: folder of the data in the pods."""
    backend: str | None = None
    """With --exp: framework of the trainer."""
    # how
    nodelist: tuple[str, ...] = ()
    """Nodes to choose from, as NODE,NODE; may be repeated."""
    exclude: tuple[str, ...] = ()
    """Nodes that are not used, as NODE,NODE; may be repeated."""
    unfit_nodes: str | None = None
    """Folder of the list of unfit nodes, which the job avoids (default: PRIMUS_UNFIT_NODES, else that of the user)."""
    queue: str | None = None
    """Kueue queue that admits the job."""
    placement: str | None = None
    """Where the pods shall stand: near (few switches, by Kueue), any, or a node label that they must share."""
    priority_class: str | None = None
    """Priority class of the pods."""
    priority: int | None = None
    """Primus-SaFE: priority from 0 to 2."""
    service_account: str | None = None
    """Service account of the pods."""
    host_network: bool = False
    """Use the network of the nodes; RDMA needs it without a secondary network."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 29500
    """Rendezvous port on node 0."""
    max_restarts: Count | None = None
    """Maximum restarts of all pods after a failure; preemption does not count (default: 3)."""
    ttl: Count | None = None
    """Seconds after which an ended job is deleted."""
    grace: Count = 600
    """Seconds for pods to save and exit after SIGTERM."""
    # commands
    workload_id: str | None = None
    """Id of the job for get, logs, delete and wait."""
    rank: Count | None = None
    """logs: rank of the node (default: 0)."""
    follow: Annotated[bool, Meta(extra={"short": ("-f",)})] = False
    """logs: print new lines until the job ends."""
    tail: Count | None = None
    """logs: print only the last N lines of a node."""
    timeout: Annotated[float, Meta(ge=0)] | None = None
    """wait: stop waiting after this many seconds, with exit code 124."""
    yes: Annotated[bool, Meta(extra={"short": ("-y",)})] = False
    """delete: do not ask for confirmation."""

    @property
    def target_name(self) -> TargetName:
        """The target, given or implied."""
        return self.target or ("safe" if self.url else "jobset")

    @property
    def gpu_vendor(self) -> Vendor:
        """Vendor of the GPUs that the pods request."""
        return "none" if self.gpu == 0 else self.vendor or "amd"

    @property
    def job_id(self) -> str:
        """Id of the job for a command; empty if none is given."""
        return self.workload_id or self.job

    @property
    def allowed_nodes(self) -> tuple[str, ...]:
        """Nodes of --nodelist, without repetitions."""
        return _split_names(self.nodelist)

    @property
    def usable_nodes(self) -> tuple[str, ...]:
        """Nodes of --nodelist that are not excluded."""
        return tuple(name for name in self.allowed_nodes if name not in self.excluded_nodes)

    @property
    def excluded_nodes(self) -> tuple[str, ...]:
        """Nodes of --exclude, without repetitions."""
        return _split_names(self.exclude)


def parse(words: Sequence[str]) -> Options:
    """Parse `words`; command and job may be anywhere among the options.

    Raises:
        UsageError: An argument is invalid, or options cannot be combined.
    """
    options, more = flags.parse_options(Options, _join_values(words), WHAT, extra=True)
    unknown = [word for word in more if word.startswith("-")]
    if unknown:
        flags.parse_options(Options, unknown[:1], WHAT)  # says which option may be meant
    options = _assign_positional_words(options, [word for word in (options.command, options.job, *more) if word])
    _check_options(options)
    return options


def split_words(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`words` with the command in front and without --exp and its options, and the task that --exp means.

    Raises:
        UsageError: An argument is invalid.
    """
    options = parse(words)
    if options.exp is None:
        commands = [word for word in words if word == options.command]
        return ((options.command, *_remove_word(words, commands[0])) if commands else tuple(words)), ()
    task = ["train", "pretrain", "--config", options.exp]
    task += ["--data_path", options.data_path] if options.data_path is not None else []
    task += ["--framework", options.backend] if options.backend is not None else []
    return remove_options(words, TASK_OPTIONS), tuple(task)


def remove_options(words: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """The words without the options of these names and their values."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in names:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return tuple(kept)


def _remove_word(words: Sequence[str], word: str) -> tuple[str, ...]:
    position = list(words).index(word)
    return (*words[:position], *words[position + 1 :])


def _assign_positional_words(options: Options, typed: list[str]) -> Options:
    """`options` with command and job from the positional arguments."""
    command = typed.pop(0) if typed else ""
    if command and command not in COMMANDS:
        raise UsageError(f"{WHAT}: unknown command '{command}'", did_you_mean(command, COMMANDS))
    job = typed.pop(0) if typed and command in JOB_COMMANDS else ""
    if typed:
        raise UsageError(f"{WHAT}: unexpected argument '{typed[0]}'", "write ' -- ' between runtimes and task")
    return structs.replace(options, command=command, job=job)


def _join_values(words: Sequence[str]) -> list[str]:
    """`words` with repeatable options joined to their value (`--env=X`), which may begin with a dash."""
    lists = {name for flag in flags.list_flags(Options) if flag.is_list for name in flag.names}
    tied: list[str] = []
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if word in lists else None
        tied.append(word if value is None else f"{word}={value}")
    return tied


def _split_names(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for word in words for name in word.split(",") if name.strip()))


def accepts_option(words: Sequence[str], name: str) -> bool:
    """Whether the command in `words` supports the option `name`; defaults of launcher files apply only then."""
    command = next((word for word in words if word in COMMANDS), "create")
    return _is_taken(command, name.removeprefix("--").replace("-", "_"))


def _check_command(options: Options) -> None:
    """Reject options of other commands."""
    command = options.command or "create"
    for field in structs.fields(Options):
        if getattr(options, field.name) != field.default and not _is_taken(command, field.name):
            raise UsageError(f"{WHAT}: {command} does not support --{field.name.replace('_', '-')}", "remove it")


def _is_taken(command: str, field: str) -> bool:
    others = {name for names in OF_COMMANDS.values() for name in names}
    return field in WHERE or (field not in others if command == "create" else field in OF_COMMANDS[command])


def _check_options(options: Options) -> None:
    """Reject options that contradict each other."""
    _check_command(options)
    if options.url and options.target_name != "safe":
        raise UsageError(f"--url (Primus-SaFE) cannot be combined with --target {options.target}", "remove one of them")
    if options.target_name == "safe" and not options.url:
        raise UsageError("--target safe needs --url", "add --url https://SERVER")
    for name in ("nodelist", "exclude"):
        if getattr(options, name) and not _split_names(getattr(options, name)):
            raise UsageError(f"{WHAT}: --{name} contains no node", f"write --{name} NODE,NODE")
    if options.nodelist and len(options.usable_nodes) < options.replica:
        usable = f"{len(options.usable_nodes)} nodes of --nodelist"
        raise UsageError(f"{WHAT}: --replica {options.replica} needs more than {usable}", "list at least as many nodes")
    of_the_task = [name for name in ("data_path", "backend") if getattr(options, name) is not None]
    if of_the_task and options.exp is None:
        raise UsageError(f"{WHAT}: --{of_the_task[0]} needs --exp", "write it after the task, behind ' -- '")
    if options.workload_id and options.job and options.workload_id != options.job:
        raise UsageError(
            f"{WHAT}: '{options.job}' and --workload-id {options.workload_id} are different jobs", "remove one of them"
        )
