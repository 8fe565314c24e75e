"""Commands that study the method and base models: ablate, finetune, analyse."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from halopose.cli.options import (
    MANY,
    Base,
    CalibrationShare,
    Confidence,
    ContextOption,
    Data,
    Device,
    End2End,
    Epochs,
    Images,
    ImageSize,
    Iou,
    Preset,
    Seed,
    Source,
    Train,
    TrainSizes,
    Unsafe,
    Val,
    ValImages,
    exponents,
    finite,
    given_options,
    positive,
)
from halopose.cli.options import sizes as parse_sizes
from halopose.cli.terminal import progress, say, say_skipped
from halopose.errors import HaloposeError

Seeds = Annotated[int, typer.Option(min=1, max=100, help="Trainings of each row, with different seeds.")]
Resamplings = Annotated[int, typer.Option(min=2, max=MANY, help="Bootstrap resamplings of images for intervals.")]


def ablate(
    command: typer.Context,
    data: Data,
    base: Base,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for rows, tables and page.")],
    train: Train = "train",
    val: Val = "val",
    images: Images = None,
    val_images: ValImages = None,
    imgsz: ImageSize = 640,
    train_sizes: TrainSizes = None,
    calibration: Source = "matched",
    calibration_share: CalibrationShare = 0.2,
    epochs: Epochs = 12,
    alphas: Annotated[str, typer.Option(help="Retention exponents to compare.")] = "0,0.5,1,2,4",
    seeds: Seeds = 5,
    bootstrap: Resamplings = 200,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Variants in parallel; default: the number of cores.")
    ] = None,
    context: ContextOption = False,
    preset: Preset = None,
    seed: Seed = 0,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Run the paper's ablations on your data: variants, paired differences, findings. Resumable.

    Example: halopose ablate data.yaml --base mine.pt -o ablation
    """
    from halopose.data.dataset_loading import load_train_val
    from halopose.data.files import make_folder, write_text
    from halopose.data.lock import locked
    from halopose.fitting.presets import PRESETS, departures, with_options
    from halopose.fitting.settings import FitSettings, TrainSettings
    from halopose.hosts.loading import load_host
    from halopose.reports import ablation_report as ablation_report
    from halopose.studies import ablation
    from halopose.studies.findings import judge
    from halopose.uncertainty.heads import head_settings

    compared, sizes = exponents(alphas, "alphas"), parse_sizes(str(imgsz) if train_sizes is None else train_sizes)
    make_folder(output)
    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
    training, validation = load_train_val(data, train, val, images=images, val_images=val_images, otherwise=host.layout)
    settings = FitSettings(
        train=TrainSettings(epochs=epochs, seed=seed),
        head=head_settings(context=context),
        train_sizes=sizes,
        imgsz=imgsz,
        calibration=calibration,
        calibration_share=calibration_share,
    )
    if preset is not None:
        settings = with_options(PRESETS[preset], settings, given_options(command))
    with locked(output), progress() as step:
        results = ablation.ablate(
            host,
            training,
            validation,
            output,
            settings,
            alphas=compared,
            seeds=seeds,
            bootstrap=bootstrap,
            workers=workers,
            progress=step,
        )
    title = f"Ablation of {host.description}"
    write_text(output / "ablation.md", ablation_report.to_markdown(results, title))
    write_text(output / "ablation.csv", ablation_report.to_csv(results))
    write_text(output / "ablation.html", ablation_report.render_ablation(results, title))
    say(f"preset: {preset or 'none'}; departures from the paper: {'; '.join(departures(settings)) or 'none'}")
    for judged in judge(results):
        say(f"{judged.verdict:13}{judged.text}")
    say(f"{len(results)} rows -> {output / 'ablation.md'}, {output / 'ablation.csv'}, {output / 'ablation.html'}")


def paper(
    command: typer.Context,
    data: Data,
    base: Base,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for paper.html, paper.md and figures.")],
    artifact: Annotated[
        Path | None, typer.Option(help="Artifact made before, to show beside the heads trained here.")
    ] = None,
    tuned: Annotated[
        Path | None, typer.Option(help="Fine-tuned base model of `halopose finetune`, for figures 20 and 21.")
    ] = None,
    train: Train = "train",
    val: Val = "val",
    images: Images = None,
    val_images: ValImages = None,
    imgsz: ImageSize = 640,
    calibration_share: CalibrationShare = 0.2,
    epochs: Epochs = 12,
    preset: Preset = "paper",
    seeds: Seeds = 5,
    bootstrap: Resamplings = 200,
    pictures: Annotated[int, typer.Option(min=0, help="Number of example pictures.")] = 4,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Variants in parallel; default: the number of cores.")
    ] = None,
    seed: Seed = 0,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Make every table and figure of the paper from your model and data, beside the paper's values. Resumable.

    Example: halopose paper data.yaml --base mine.pt -o paper
    """
    from halopose.data.dataset_loading import load_train_val
    from halopose.data.files import make_folder, write_text
    from halopose.data.lock import locked
    from halopose.fitting.artifact import Artifact
    from halopose.fitting.presets import PRESETS, with_options
    from halopose.fitting.settings import FitSettings, TrainSettings
    from halopose.hosts.loading import load_host
    from halopose.prediction.uncertain_pose import UncertainPose
    from halopose.reports.example_pictures import write_examples
    from halopose.reports.paper_page import paper_files, paper_page
    from halopose.reports.score_text import to_text
    from halopose.studies.paper import run_paper

    make_folder(output)
    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
    made = None if artifact is None else Artifact.load(artifact)
    after = None if tuned is None else load_host(tuned, device=device, unsafe=unsafe, end2end=end2end)
    training, validation = load_train_val(data, train, val, images=images, val_images=val_images, otherwise=host.layout)
    given = FitSettings(
        train=TrainSettings(epochs=epochs, seed=seed),
        imgsz=imgsz,
        train_sizes=(imgsz,),
        calibration_share=calibration_share,
    )
    settings = with_options(PRESETS[preset or "paper"], given, given_options(command))
    with locked(output), progress() as step:
        study = run_paper(
            host,
            training,
            validation,
            output,
            settings,
            artifact=made,
            tuned=after,
            seeds=seeds,
            bootstrap=bootstrap,
            workers=workers,
            progress=step,
        )
    study.heads.save(output / "heads.safetensors")
    scored = validation.subset(study.heads.card.images.of("evaluation"))
    model = UncertainPose(host, study.heads)
    write_examples(model, scored, output / "pictures", pictures, imgsz=settings.imgsz)
    shown = [f"pictures/{path.name}" for path in sorted((output / "pictures").glob("*.jpg"))[:pictures]]
    for name, text in paper_files(paper_page(study, shown)).items():
        write_text(output / name, text)
    say(to_text(study.fitted))
    say(f"-> {output / 'paper.html'}, {output / 'paper.md'}")


def finetune(
    data: Data,
    base: Base,
    output: Annotated[Path, typer.Option("--output", "-o", help="Fine-tuned base model to write, .pt.")],
    loss: Annotated[
        Literal["poks", "oks"], typer.Option(help="Keypoint loss; oks is the loss of the framework.")
    ] = "poks",
    train: Train = "train",
    val: Val = "val",
    images: Images = None,
    val_images: ValImages = None,
    work: Annotated[Path | None, typer.Option(help="Work folder; default: beside the output.")] = None,
    sigma: Annotated[
        float | None,
        typer.Option(callback=positive, help="OKS sigma of all keypoints in the loss; default: the data's."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, max=MANY, help="Epochs of fine-tuning.")] = 10,
    lr: Annotated[float, typer.Option(max=1.0, callback=positive, help="Highest learning rate of AdamW.")] = 1e-4,
    imgsz: ImageSize = 640,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch, over all devices.")] = 16,
    freeze: Annotated[int, typer.Option(min=0, help="Number of first layers to freeze.")] = 0,
    mirror: Annotated[bool, typer.Option(help="Mirror images with probability 0.5.")] = True,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load images, on a GPU.")] = 4,
    amp: Annotated[bool, typer.Option("--amp", help="Mixed precision, bfloat16.")] = False,
    control: Annotated[bool, typer.Option(help="Also fine-tune a control with the framework's own loss.")] = True,
    heads: Annotated[bool, typer.Option(help="Compare calibration with heads trained for each model.")] = True,
    head_epochs: Epochs = 12,
    conf: Annotated[
        float, typer.Option(min=0.0, max=1.0, callback=finite, help="Lowest confidence of detections for calibration.")
    ] = 0.01,
    bootstrap: Resamplings = 200,
    seed: Seed = 0,
    device: Annotated[str | None, typer.Option(help="cpu, 0, or 0,1 for several GPUs.")] = None,
    unsafe: Unsafe = False,
) -> None:
    """Fine-tune a base model towards Gaussian residuals, and compare it with the original and a control.

    Example: halopose finetune data.yaml --base mine.pt -o study
    """
    from dataclasses import asdict

    from halopose.data.dataset_loading import load_train_val
    from halopose.data.files import make_folder, make_room, write_json, write_text
    from halopose.data.lock import locked
    from halopose.finetuning.finetuning_settings import FinetuneSettings
    from halopose.hosts.loading import load_host
    from halopose.reports import finetuning_report as finetune_page
    from halopose.studies import finetuning_study as tuning

    if output.suffix != ".pt":
        raise HaloposeError(f"the fine-tuned base model is a .pt file: change its suffix, got -o {output}")
    for suffix in (".pt", ".json", ".html"):
        make_room(output.with_suffix(suffix))
    work = make_folder(work or output.with_name(f"{output.stem}-work"))
    layout = load_host(base, unsafe=unsafe).layout
    training, validation = load_train_val(data, train, val, images=images, val_images=val_images, otherwise=layout)
    settings = FinetuneSettings(
        loss=loss,
        sigma=sigma,
        epochs=epochs,
        learning_rate=lr,
        imgsz=imgsz,
        batch=batch,
        freeze=freeze,
        mirror=mirror,
        seed=seed,
        workers=workers,
        amp=amp,
    )
    comparison = tuning.ComparisonSettings(control, heads, head_epochs, conf, bootstrap)
    with locked(work), progress() as step:
        scores = tuning.finetune(
            base,
            training,
            validation,
            output,
            work,
            settings,
            comparison,
            device=device,
            unsafe=unsafe,
            progress=step,
        )
    about = {
        "base": base.name,
        "settings": asdict(settings),
        "judging": asdict(comparison),
        "images": {"training": len(training), "validation": len(validation)},
    }
    write_json(output.with_suffix(".json"), about | tuning.to_json(scores))
    page = output.with_suffix(".html")
    write_text(page, finetune_page.render_finetuning(scores, f"Fine-tuning of {base.name}"))
    say(finetune_page.to_text(scores))
    say(f"-> {output}, {output.with_suffix('.json')}, {page}")


def analyse(
    data: Data,
    base: Base,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for analysis.json and analysis.html.")],
    split: Annotated[str, typer.Option(help="Split of the data yaml; several with commas.")] = "val",
    images: Images = None,
    imgsz: ImageSize = 640,
    conf: Confidence = 0.01,
    iou: Iou = 0.7,
    bootstrap: Resamplings = 200,
    seed: Seed = 0,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Analyse the residuals of a base model without heads, and recommend settings.

    Example: halopose analyse data.yaml --base mine.pt -o analysis
    """
    from halopose.data.dataset_loading import load_dataset
    from halopose.data.files import make_folder, write_json, write_text
    from halopose.data.lock import locked
    from halopose.fitting.pipeline import collect_validation
    from halopose.fitting.settings import FitSettings
    from halopose.hosts.loading import load_host
    from halopose.reports import analysis_report as analysis_page
    from halopose.studies import residual_analysis

    make_folder(output)
    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
    dataset = load_dataset(data, split, images=images, otherwise=host.layout)
    settings = FitSettings(imgsz=imgsz, conf=conf, iou=iou)
    with locked(output), progress() as step:
        store = collect_validation(host, dataset, output / "store", settings, step)
    say_skipped(store)
    chosen = residual_analysis.AnalysisSettings(bootstrap=bootstrap, seed=seed)
    result = residual_analysis.analyse(store, chosen)
    write_json(output / "analysis.json", result)
    write_text(output / "analysis.html", analysis_page.render_analysis(result, f"Residuals of {host.description}"))
    for advice in result["recommendations"]:
        say(f"{advice['setting']:20}{advice['value']:13}{advice['why']}")
    say(f"-> {output / 'analysis.json'}, {output / 'analysis.html'}")
    say(f"next: {_fit_command(data, base, images, imgsz, result['recommendations'])}")


def _fit_command(data: Path, base: Path, images: Path | None, imgsz: int, advice: list[dict[str, str]]) -> str:
    """Return the command with the recommended settings."""
    value = {entry["setting"]: entry["value"] for entry in advice}
    words = ["halopose", "fit", data, "--base", base, "--imgsz", imgsz, "--dispersion", value["dispersion"]]
    words += ["--alpha", value["alpha"]]
    words += ["--images", images] if images is not None else []
    words += ["--no-scale-weight"] if value["scale-weight"] == "off" else []
    return shlex.join(str(word) for word in [*words, "-o", "heads.safetensors"])
