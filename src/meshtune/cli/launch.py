"""`meshtune launch`: a run in several processes, here or by a scheduler."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from meshtune.errors import UserError

app = typer.Typer(
    help="Run a recipe in several processes: here, under Slurm, Kubernetes or SkyPilot.", no_args_is_help=True
)

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE [KEY=VALUE]",
        help="As for meshtune train: a YAML recipe, then what to change in it.",
        show_default=False,
    ),
]

Out = Annotated[pathlib.Path | None, typer.Option("--out", "-o", help="Where the file goes; - prints it.")]


@app.command()
def local(
    arguments: Arguments,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="Processes on this machine.")] = 1,
    devices: Annotated[
        int | None,
        typer.Option("--devices", "-d", min=1, help="Devices each: GPUs, or on a CPU simulated devices."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the output.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew; the old run is moved aside.")] = False,
) -> None:
    """Run here; process 0 is shown, each process's output is in OUTPUT/logs."""
    from rich.console import Console

    from meshtune.launch.local import launch
    from meshtune.launch.train_command import parse_train_command

    arguments += [*["resume=true"] * resume, *["overwrite=true"] * overwrite]
    code = launch(parse_train_command(arguments), processes, devices, Console(stderr=True, highlight=False))
    raise typer.Exit(code)


@app.command()
def slurm(
    arguments: Arguments,
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="Nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", "-g", min=0, help="GPUs of each node; 0: CPUs.")] = 8,
    processes_per_node: Annotated[
        int, typer.Option("--processes-per-node", min=1, help="Processes a node; one drives all its GPUs.")
    ] = 1,
    time: Annotated[str | None, typer.Option("--time", "-t", help="Limit of one go: 4:00:00 or 2-00:00:00.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="Partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="Account.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Quality of service.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job; default: that of the output.")] = None,
    cpus: Annotated[int | None, typer.Option("--cpus-per-process", min=1, help="CPU cores for each process.")] = None,
    memory: Annotated[str | None, typer.Option("--mem", help="Memory of each node, as 200G; 0: all.")] = None,
    mail: Annotated[str | None, typer.Option("--mail", help="Address that is written to.")] = None,
    mail_type: Annotated[str, typer.Option("--mail-type", help="When: BEGIN, END, FAIL, REQUEUE, ALL.")] = "END,FAIL",
    warning: Annotated[int, typer.Option("--warning", min=30, help="Seconds before the limit to save and stop.")] = 120,
    container: Annotated[
        str | None, typer.Option("--container", help="An image: rocm/jax, nvcr.io#nvidia/jax, or a .sif file.")
    ] = None,
    container_runtime: Annotated[str | None, typer.Option("--container-runtime", help="pyxis or apptainer.")] = None,
    mount: Annotated[list[str] | None, typer.Option("--mount", help="A shared directory the container sees.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option("--sbatch", help="Any other option of sbatch, as it is.")] = None,
    out: Out = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to sbatch.")] = False,
) -> None:
    """Write a batch script for Slurm: restarts, signals, containers and shared storage seen to."""
    from meshtune.launch import slurm as writer
    from meshtune.launch.train_command import parse_restartable_command

    command = parse_restartable_command(arguments)
    options = writer.SlurmOptions(
        nodes,
        gpus_per_node,
        processes=processes_per_node,
        time=time,
        partition=partition,
        account=account,
        qos=qos,
        name=name,
        cpus=cpus,
        memory=memory,
        mail=mail,
        mail_type=mail_type,
        warning=warning,
        container=container,
        runtime=container_runtime,
        mounts=tuple(mount or ()),
        extra=tuple(sbatch or ()),
    )
    path = _write(writer.batch_script(command, options), out, f"{command.name}.sbatch")
    if path is None:
        return
    if submit:
        print(f"job {writer.submit(path)} submitted; its progress: tail -F {command.logs}/process-0.log")
    else:
        print(f"submit it with: sbatch {path}")


@app.command()
def k8s(
    arguments: Arguments,
    image: Annotated[str, typer.Option("--image", help="An image that holds Meshtune (docker/).", show_default=False)],
    claim: Annotated[
        str, typer.Option("--claim", help="PersistentVolumeClaim (ReadWriteMany) all mount.", show_default=False)
    ],
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="Pods, one a node.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", "-g", min=0, help="Accelerators of each; 0: CPUs.")
    ] = 8,
    vendor: Annotated[str, typer.Option("--vendor", help="nvidia, amd or tpu.")] = "nvidia",
    mount: Annotated[
        str, typer.Option("--mount", help="Where the claim is mounted; paths count from there.")
    ] = "/shared",
    name: Annotated[str | None, typer.Option("--name", help="Name of the JobSet; default: that of the output.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Namespace.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="Kueue's local queue.")] = None,
    cpus: Annotated[str | None, typer.Option("--cpus", help="CPU cores of each pod.")] = None,
    memory: Annotated[str | None, typer.Option("--mem", help="Memory of each pod, as 200Gi.")] = None,
    node_label: Annotated[list[str] | None, typer.Option("--node-label", help="Only nodes with key=value.")] = None,
    warning: Annotated[int, typer.Option("--warning", min=30, help="Seconds to save in when stopped.")] = 120,
    out: Out = None,
) -> None:
    """Write a JobSet for Kubernetes, with the recipe in it."""
    from meshtune.launch import kubernetes as writer
    from meshtune.launch.train_command import parse_restartable_command

    command = parse_restartable_command(arguments, output_is_visible=False)
    labels = tuple(node_label or ())
    options = writer.JobSetOptions(
        image, nodes, gpus_per_node, vendor, claim, mount, name, namespace, queue, cpus, memory, labels, warning
    )
    path = _write(writer.manifest(command, options), out, f"{command.name}.jobset.yaml")
    if path is not None:
        print(f"start it with: kubectl apply -f {path}")


@app.command()
def skypilot(
    arguments: Arguments,
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="Machines.")] = 1,
    accelerators: Annotated[
        str | None, typer.Option("--accelerators", "-a", help="Of each machine: H100:8; none: CPUs.")
    ] = None,
    volume: Annotated[str | None, typer.Option("--volume", help="A SkyPilot volume, mounted on all.")] = None,
    bucket: Annotated[str | None, typer.Option("--bucket", help="s3://name or gs://name, mounted on all.")] = None,
    mount: Annotated[str, typer.Option("--mount", help="Where; the output lies in it.")] = "/shared",
    name: Annotated[str | None, typer.Option("--name", help="Name of the task; default: that of the output.")] = None,
    image: Annotated[str | None, typer.Option("--image", help="A container image.")] = None,
    infra: Annotated[str | None, typer.Option("--infra", help="aws, gcp/us-central1, k8s/context ...")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Spot machines.")] = False,
    setup: Annotated[
        str, typer.Option("--setup", help="What installs Meshtune on a machine.")
    ] = "pip install 'meshtune[cuda13]'",
    out: Out = None,
) -> None:
    """Write a task for SkyPilot."""
    from meshtune.launch import skypilot as writer
    from meshtune.launch.train_command import parse_restartable_command

    command = parse_restartable_command(arguments, output_is_visible=False)
    options = writer.TaskOptions(nodes, accelerators, name, image, infra, spot, volume, bucket, mount, setup)
    path = _write(writer.task_yaml(command, options), out, f"{command.name}.sky.yaml")
    if path is not None:
        print(f"start it with: sky jobs launch {path}")


def _write(text: str, out: pathlib.Path | None, name: str) -> pathlib.Path | None:
    """Writes the file to `out`, or `name` by default; returns its path, or None if it was printed."""
    if str(out) == "-":
        print(text, end="")
        return None
    path = out or pathlib.Path(name)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the file cannot be written: {error.strerror}", where=str(path), fix="give --out") from None
    print(f"written: {path}")
    return path
