"""Signatures of launchers: torchrun's agent, and the steps of a job that one another end."""

from __future__ import annotations

from primus.diagnosis.signature import Signature, SignaturePattern, signs

SIGNATURES = (
    Signature(
        name="hang",
        role="root",
        action="retry",
        strength="likely",
        signs=(
            *signs("hang detected, exit with code 100", "all ranks hang"),
            SignaturePattern("hangs: no progress for", r"rank \d+ hangs: no progress for"),
        ),
        exit_codes=(100,),
        systems=("primus", "any"),
        cause="ranks made no progress for longer than the limit",
        fix="read the stacks in logs/attempt_N/rank_R.stacks.txt; look at the rank that is in no collective",
        source="primus.launch; AMD-AGI/Primus-SaFE HANG_CHECK_INTERVAL",
    ),
    Signature(
        name="node-lost",
        role="root",
        action="exclude",
        strength="likely",
        signs=(
            *signs("DUE TO NODE FAILURE", "Node failure on", "NodeNotReady", "node is not ready", "NodeLost"),
            *signs("Zero Bytes were transmitted or received", "client_loop: send disconnect"),
            SignaturePattern("Connection to ", r"Connection to \S+ closed by remote host"),
            SignaturePattern("heartbeat", r"\blost heartbeats? of\b"),
        ),
        systems=("Slurm", "Kubernetes", "any"),
        cause="a node went away",
        fix="leave the node out (--exclude) until it is looked after",
        source="slurm.schedmd.com/sbatch.html; kubernetes.io node conditions",
    ),
    Signature(
        name="agent-terminated",
        role="cascade",
        signs=(
            SignaturePattern("SignalException", r"got signal: (?!9\b)\d+"),
            SignaturePattern("closing signal SIG", r"Sending process \d+ closing signal SIG"),
            SignaturePattern("Received Signals.SIG"),
            SignaturePattern("Received SIGTERM"),
            SignaturePattern("RendezvousGracefulExitError"),
        ),
        systems=("torchrun",),
        cause="the launcher was told to stop, and told its ranks",
        fix="look for who sent the signal: the scheduler, a sibling, a person",
        source="observed: torchrun 2.15",
    ),
    Signature(
        name="grace-expired",
        role="cascade",
        signs=(SignaturePattern("Unable to shutdown process", r"forcefully exiting via"),),
        systems=("torchrun",),
        cause="a rank did not end in the time that it was given",
        fix="saving takes longer than the grace: give more (--shutdown-timeout of torchrun)",
        source="observed: torchrun 2.15",
    ),
    Signature(
        name="step-terminated",
        role="cascade",
        signs=(
            *signs(
                "Exited with exit code 143", "_step_signal: Terminating", "Terminating StepId=", "Terminating job step"
            ),
            SignaturePattern(": Terminated", r"task[s]? [\d,-]+: (Terminated|Killed)\s*$"),
            SignaturePattern(": Killed", r"task[s]? [\d,-]+: (Terminated|Killed)\s*$"),
            SignaturePattern("*** STEP ", r"CANCELLED AT [\dT:-]+ \*\*\*"),
            *signs("srun: Job step aborted"),
        ),
        systems=("Slurm",),
        cause="a task ended because another one of its job step had failed",
        fix="the other task's line is the root",
        source="observed: Slurm 22.05.8",
    ),
    Signature(
        name="worker-group-failed",
        role="cascade",
        signs=(
            *signs("ChildFailedError", "Worker group FAILED", "Stopping worker group", "BackoffLimitExceeded"),
            *signs("MPI_ABORT was invoked on rank", "CrashLoopBackOff", "Back-off restarting failed container"),
            SignaturePattern("Signal ", r"Signal \d+ \(SIG\w+\) received by PID \d+"),
        ),
        systems=("torchrun",),
        cause="the launcher saw a rank fail; what it failed of is in the rank's log",
        fix="read the log of the rank that torchrun names",
        source="observed: torchrun 2.15",
    ),
    Signature(
        name="unfit-node",
        role="root",
        action="exclude",
        signs=(SignaturePattern("; nothing was started", r"preflight: .* is .*; nothing was started"),),
        systems=("primus",),
        cause="a node did not pass the checks before the start",
        fix="read its report: `direct -- preflight` on that node",
        source="primus.tasks.train",
    ),
    Signature(
        name="different-nodes",
        role="root",
        action="stop",
        signs=(
            *signs("was started with another configuration than node 0"),
            SignaturePattern("refuses node", r"node 0 refuses node \d+"),
        ),
        systems=("primus",),
        cause="the nodes were not started with the same command",
        fix="start every node with the same command and configuration",
        source="primus.launch.nodes.rendezvous",
    ),
)
