"""Show how the GPUs and NICs of a node, or the nodes of a cluster, are connected, as a table or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.errors import UsageError
from primus.machine import topology as relations
from primus.machine.facts import Device, MachineFacts, PcieLink
from primus.machine.topology import WORDS, Topology
from primus.report import page, table, topology_picture
from primus.runs import files
from primus.task import TaskContext

DEFAULT_FILE = "topology.html"
GPU_HEADER = ("", "model", "address", "NUMA", "PCIe", "PCIe max", "memory", "partitions", "hive")


class Options(Struct, frozen=True, kw_only=True):
    """Options of `analyze topology`."""

    visualize: bool = False
    """Also write a picture: topology.html in the working directory, or the file of --output."""
    output: str | None = None
    """File of the picture: a page (.html), or the picture alone (.svg)."""
    root: str | None = None
    """Root of a recorded machine: a directory with its sys and proc; default: this node."""
    assume: str | None = None
    """Assume another machine: MODEL or MODEL:GPUS, such as mi300x:8."""
    assume_nic: str | None = None
    """NICs of the assumed machine: ainic, broadcom, mellanox or slingshot."""
    full: bool = False
    """Also show the links between NICs; by default only those to GPUs."""
    nodes: bool = False
    """Show the nodes of a cluster below their switches, and the node ranks of a job on them."""
    assume_cluster: str | None = None
    """Nodes: file of the switches above each node, as for `direct --topology-file`."""
    run: str | None = None
    """Nodes: those of a run."""
    config: str | None = None
    """Nodes: experiment of the job (default: a reduction over all ranks)."""
    nproc: Annotated[int, Meta(ge=1)] = 8
    """Nodes: ranks on a node."""


def run(options: Options, context: TaskContext) -> None:
    """Print the topology, and write its picture on request.

    Raises:
        UsageError: The root holds no recorded machine, or the output is neither .html nor .svg.
        PrimusError: The picture cannot be written.
    """
    output = _parse_output_path(options)
    if options.nodes or options.assume_cluster:
        _show_cluster(options, output, context)
        return
    facts = _read_topology_facts(options, context)
    topology = relations.build_topology(facts)
    value = {"host": facts.host, "assumed": facts.assumed, "devices": facts.devices, "links": facts.links}
    context.result(
        value | {"topology": topology, "problems": relations.find_device_problems(facts)},
        _format_topology(facts, topology, options.full),
    )
    if output:
        is_picture = output.suffix == ".svg"
        picture = f"{topology_picture.draw_topology_svg(facts, topology)}\n" if is_picture else ""
        files.write_text(output, picture or _format_topology_page(facts, topology, options.full))
        context.say(f"\npicture: {output}")


def _show_cluster(options: Options, output: Path | None, context: TaskContext) -> None:
    from primus.tasks.analyze._cluster import rank_cluster  # reads topology files and experiments

    if output and output.suffix != ".html":
        raise UsageError(f"--output {output}: nodes are drawn on a page", "use a name that ends with .html")
    cluster = rank_cluster(options.assume_cluster, options.run, options.config, options.nproc, context.environ)
    context.result(cluster.topology, cluster.format_text())
    if output:
        files.write_text(output, cluster.format_page())
        context.say(f"\npicture: {output}")


def _parse_output_path(options: Options) -> Path | None:
    if not options.visualize and not options.output:
        return None
    path = Path(options.output or DEFAULT_FILE)
    if path.suffix not in (".html", ".svg"):
        raise UsageError(f"--output {path}: neither .html nor .svg", "use one of these suffixes")
    return path


def _read_topology_facts(options: Options, context: TaskContext) -> MachineFacts:
    if options.root is not None and options.assume is not None:
        raise UsageError("--root and --assume are mutually exclusive", "use one of them")
    if options.assume_nic is not None and options.assume is None:
        raise UsageError("--assume-nic describes an assumed machine", "add --assume MODEL")
    if options.assume is not None:
        from primus.machine.assumed_machine import build_assumed_machine

        return build_assumed_machine(options.assume, options.assume_nic)
    if options.root is None:
        return context.facts()
    root = Path(options.root)
    if not (root / "sys").is_dir():
        raise UsageError(
            f"--root {root}: not a recorded machine", "a recorded machine is a directory that contains 'sys'"
        )
    from primus.machine.probe import probe

    return probe(root)


def _format_topology(facts: MachineFacts, topology: Topology, full: bool) -> str:
    parts = [
        _format_machine_name(facts),
        table.format_table(GPU_HEADER, _list_gpu_rows(facts), right=(6,)) if facts.devices else "no GPU on this node",
        table.format_table(*_build_relation_matrix(topology, full)) if topology.ends else "no NIC on this node",
        "\n".join(f"{word:<5} {meaning}" for word, meaning in _list_legend_entries(topology, full)),
        "\n".join(f"warning: {warning}" for warning in topology.warnings),
        "\n".join(f"problem: {problem.where}: {problem.problem}" for problem in relations.find_device_problems(facts)),
    ]
    return "\n\n".join(part for part in parts if part)


def _format_topology_page(facts: MachineFacts, topology: Topology, full: bool) -> str:
    picture = topology_picture.draw_topology_for_page(facts, topology)
    legend = [(page.make_element("strong", word), meaning) for word, meaning in _list_legend_entries(topology, full)]
    odd = [(page.make_badge("warn"), warning) for warning in topology.warnings]
    odd += [
        (page.make_badge("unknown"), f"{problem.where}: {problem.problem}")
        for problem in relations.find_device_problems(facts)
    ]
    sections: list[tuple[str, object]] = [("", page.make_element("div", picture, class_="wide"))]
    if odd:
        sections.append(("Warnings", page.make_table(("status", "what"), odd)))
    if facts.devices:
        sections.append(("Cards", page.make_table(GPU_HEADER, _list_gpu_rows(facts), right=(6,))))
    if topology.ends:
        sections.append(
            (
                "Relations",
                page.join_fragments(
                    page.make_table(*_build_relation_matrix(topology, full)),
                    page.make_table(("word", "meaning"), legend),
                ),
            )
        )
    return page.format_page(f"Topology of {_format_machine_name(facts)}", sections)


def _format_machine_name(facts: MachineFacts) -> str:
    return "an assumed machine" if facts.assumed else facts.host or "this node"


def _list_gpu_rows(facts: MachineFacts) -> list[list[str]]:
    return [
        [
            f"GPU{device.index}",
            device.model or device.name or "-",
            device.bdf or "-",
            "-" if device.numa_node is None else str(device.numa_node),
            _format_pcie_link(device.pcie.speed_gts, device.pcie.width),
            _format_best_pcie_link(device.pcie),
            table.format_size(device.memory_bytes) if device.memory_bytes else "-",
            _format_partition_count(facts, device),
            _format_hive_number(facts, device),
        ]
        for device in facts.devices
    ]


def _format_pcie_link(speed_gts: float | None, width: int | None) -> str:
    return " ".join([*([f"{speed_gts:g} GT/s"] if speed_gts else []), *([f"x{width}"] if width else [])]) or "-"


def _format_best_pcie_link(link: PcieLink) -> str:
    return _format_pcie_link(link.max_speed_gts, link.max_width)


def _format_partition_count(facts: MachineFacts, device: Device) -> str:
    expected = relations.count_expected_partitions(facts, device)
    number = len(device.partitions)
    shown = str(number) if number == expected else f"{number} of {expected}"
    return " ".join(filter(None, [shown, device.partition_mode, device.memory_mode]))


def _format_hive_number(facts: MachineFacts, device: Device) -> str:
    """Index of the GPU's hive in order of appearance, since ids are long."""
    hives = list(dict.fromkeys(other.hive for other in facts.devices if other.hive))
    return str(hives.index(device.hive)) if device.hive else "-"


def _build_relation_matrix(topology: Topology, full: bool) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the link types from each end to the GPUs, or to all ends; then its NUMA node.

    Without GPUs all ends are compared.
    """
    shown = _count_columns(topology, full)
    rows = [
        [end.name, *words[:shown], "-" if end.numa_node is None else str(end.numa_node)]
        for end, words in zip(topology.ends, topology.matrix, strict=True)
    ]
    return ["", *(end.name for end in topology.ends[:shown]), "NUMA"], rows


def _count_columns(topology: Topology, full: bool) -> int:
    num_gpus = sum(end.kind == "gpu" for end in topology.ends)
    return len(topology.ends) if full or not num_gpus else num_gpus


def _list_legend_entries(topology: Topology, full: bool) -> list[tuple[str, str]]:
    """The link types in the matrix, with their meanings."""
    shown = _count_columns(topology, full)
    words = {relations.format_legend_word(word) for row in topology.matrix for word in row[:shown]}
    return [(word, meaning) for word, meaning in WORDS.items() if word in words]
