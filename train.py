"""Train a language model: `python train.py`, and any key=value of configs/schema.py to change the run."""

import os
import shlex
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import weights
from configs import compose
from configs.schema import TrainConfig, register
from data.batches import Windows
from data.prepare import prepare
from training.batches import Batches, check_batch
from training.device import choose_device, choose_dtype, compute_alike, out_of_memory, reuse_memory, try_compiled
from training.evaluate import Evaluation, evaluate, sample
from training.flops import flops_per_token, matmul_peak
from training.objective import NextTokenLoss, recompute_blocks
from training.optimizer import clip_gradients, make_optimizer, set_learning_rate
from training.plan import REMEDY, make_plan, prediction, timed, update
from training.plan_ranks import rank_plans
from training.ranks import LOST, Ranks, callable_in_parts, lost_a_rank
from training.reporting import Report, Scale, check_wandb, load_libraries, start_wandb
from training.results import Outcome, sweep_table
from training.run import StopRequest, named_optimizer_state, open_folder
from training.schedule import learning_rate_share
from training.start import Start, with_vocabulary
from training.update import Precision, accumulate, require_finite


def train(config: TrainConfig, ranks: Ranks) -> Outcome:
    """Run to the end, or to a signal. Raises ValueError or OSError, in one line, for what cannot be done."""
    began = time.perf_counter()
    say = print if ranks.main else silent
    device = choose_device(config.device, ranks.local_rank)
    compute_alike(device, config.compile)
    reuse_memory()
    precision = Precision(device, choose_dtype(config.dtype, device))
    planned = Ranks(world=config.plan_ranks) if config.dry_run and config.plan_ranks else ranks
    micro_batch_size = check_batch(config.batch_size, config.micro_batch_size, planned.world)
    check_wandb(config.wandb)
    if config.parallel == "fsdp" and ranks.world == 1:
        say("parallel=fsdp is ignored: this is the only process (torchrun --nproc_per_node=N starts N)", file=sys.stderr)

    start = Start(config.resume, config.init_from)
    progress = start.progress
    if progress.step >= config.steps and not (config.eval_only or config.dry_run):
        say(f"{config.run_dir} is finished: {progress.step} of steps={config.steps} are done. Raise steps to go on")
        return Outcome(0, str(config.run_dir), progress.best_loss)
    source, notices = start.tokenizer() or config.tokenizer, None if ranks.main else silent
    corpus = ranks.main_first(lambda: prepare(config.data, source, config.model.context_length, notices))
    tokenizer, context = corpus.tokenizer, config.model.context_length
    config = replace(config, model=with_vocabulary(config.model, tokenizer))
    validation = Windows(corpus.val, context, seed=None)
    batches = Batches(Windows(corpus.train, context, config.seed), config.batch_size, micro_batch_size, planned, device)

    if config.dry_run:
        plan = make_plan(config.model, config.optimizer, batches, precision, config.checkpoint_activations, config.steps)
        say(plan)
        if planned.world > 1:
            plans = rank_plans(config.model, config.optimizer, batches, precision, config.checkpoint_activations)
            say(*plans.values(), sep="\n")
        if planned is not ranks or ranks.highest(int(not plan.fits)):
            return Outcome()

    model = start.model(config.model, config.seed)
    objective = NextTokenLoss(model)
    if config.checkpoint_activations:
        recompute_blocks(model)
    wrapped = ranks.wrap(objective, config.parallel, device, precision.dtype)

    def evaluation(limit: int | None = config.eval_windows) -> Evaluation:
        with precision.autocast():
            return evaluate(objective, validation, micro_batch_size, ranks, limit)

    if config.eval_only:
        found = evaluation()
        say(f"{found} | {found.n_targets:,} validation tokens of {corpus.folder}")
        return Outcome(val_loss=found.loss)
    if config.compile and (problem := try_compiled(objective, wrapped, batches.at(0)[0][0], precision.autocast())):
        say(f"compile=true does not work here ({problem}): going on without it", file=sys.stderr)
    optimizer = make_optimizer(config.optimizer, model)
    start.restore(optimizer, model, precision)
    if config.dry_run:
        load_libraries(config.wandb)
        step = timed(lambda: update(wrapped, optimizer, batches.at(0)[0], ranks, precision), ranks)
        windows = min(len(validation), config.eval_windows or len(validation))
        part = min(windows, 2 * micro_batch_size)
        evaluations = -(-config.steps // (config.eval_every or config.steps))
        say(prediction(config.steps, step, evaluations, timed(lambda: evaluation(part), ranks) * windows / part, device))
        return Outcome()

    with (
        open_folder(config.run_dir, config.resume, config.overwrite) if ranks.main else nullcontext() as folder,
        StopRequest(ranks) as stop,
    ):
        config = replace(config, run_dir=ranks.agree(folder and str(folder.path)))
        wandb_run = start_wandb(config.wandb, folder, progress, asdict(config)) if folder else None
        if folder:
            changed = compose.changes(folder.config, config) if config.resume else []
            folder.begin(compose.to_yaml(config, tokenizer), progress, start.folder if config.resume else None)
        peak = matmul_peak(device, precision.dtype) * ranks.world
        scale = Scale(config.steps, config.batch_size * context, flops_per_token(model), peak)

        def save() -> None:
            state = {
                "model": model.state_dict(),
                "optimizer": named_optimizer_state(optimizer, model),
                "scaler": precision.scaler.state_dict(),
            }
            state = ranks.gather(state)
            if folder:
                about = {"tokens": progress.position * context, "command": shlex.join(sys.argv)}
                folder.save(progress, config.model, state, tokenizer, about, config.keep_checkpoints)
            report.saved()

        with Report(folder, wandb_run, progress, scale, device, began) as report:
            n_parameters = sum(p.numel() for p in model.parameters())
            size = f"{n_parameters:,} parameters, {config.steps:,} steps of {scale.tokens_per_step:,} tokens"
            report.say(f"{config.run_dir}: {size} in {precision.dtype} on {device}".replace("torch.", ""))
            if progress.step and folder:
                report.say("; ".join([f"going on from step {progress.step}", *changed]))
            saved = progress.step
            while progress.step < config.steps and not stop.requested():
                share = learning_rate_share(config.schedule, progress.step, config.steps)
                set_learning_rate(optimizer, share)
                micro_batches, n_targets = batches.at(progress.position)
                seed = (config.seed, progress.step)
                loss = accumulate(wrapped, micro_batches, n_targets, ranks=ranks, seed=seed, precision=precision).item()
                precision.scaler.unscale_(optimizer)
                norm = clip_gradients(model.parameters(), config.optimizer.grad_clip).item()
                require_finite(loss, norm, progress.step, precision.scaler)  # before the weights move
                precision.scaler.step(optimizer)
                precision.scaler.update()
                optimizer.zero_grad(set_to_none=True)
                progress.advance(config.batch_size)

                last, best = progress.step == config.steps, False
                report.step(progress, loss, norm, share * config.optimizer.lr, log=progress.due(config.log_every) or last)
                if progress.due(config.eval_every) or last:
                    found = evaluation()
                    best = progress.improved(found.loss)
                    report.evaluation(progress, found, best)
                if progress.due(config.sample_every) or last:
                    with callable_in_parts(objective):
                        report.sample(progress, sample(model, tokenizer, config.prompt))
                if progress.due(config.save_every or config.eval_every) or best or last:
                    save()
                    saved = progress.step
            if saved != progress.step:
                save()

    if stop.signal is not None and progress.step < config.steps:
        say(f"stopped at step {progress.step}, saved: python train.py resume={config.run_dir} goes on", file=sys.stderr)
        return Outcome(128 + stop.signal, str(config.run_dir), progress.best_loss)
    say(f'{config.run_dir} is done: python sample.py --checkpoint {config.run_dir} --prompt "..."')
    return Outcome(0, str(config.run_dir), progress.best_loss)


def silent(*_: Any, **__: Any) -> None:
    """How ranks other than the first print."""


def run_job(composed: DictConfig, ranks: Ranks, jobs: list[Outcome]) -> None:
    """One run. If it is one of a sweep, its error does not end the others."""
    overrides = compose.sweep_overrides()
    try:
        outcome = train(compose.to_config(composed, weights.model_config), ranks)
    except OmegaConfBaseException as problem:
        outcome = Outcome(error=compose.explain(problem))
    except (ValueError, OSError) as problem:
        outcome = Outcome(error=one_line(problem))
    except (RuntimeError, MemoryError) as problem:
        if not out_of_memory(problem) and not lost_a_rank(problem):
            raise
        what = f"out of memory ({one_line(problem)[:160]}). {REMEDY}"
        outcome = Outcome(error=LOST if lost_a_rank(problem) else what)
    if outcome.error and (overrides is None or ranks.world > 1):
        fail(ranks, outcome.error)
    if outcome.error:
        print(f"error: {outcome.error}", file=sys.stderr)
    if outcome.status:
        ranks.stop()
        sys.exit(outcome.status)
    jobs.append(replace(outcome, overrides=tuple(overrides or ())))


def fail(ranks: Ranks, message: str) -> NoReturn:
    sys.exit(f"error: {message}" if ranks.first_to_fail() else 1)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def main() -> None:
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise here, rather than print a traceback and a hint
    warnings.filterwarnings("ignore", module="hydra")
    ranks = Ranks.from_environment()
    jobs: list[Outcome] = []
    compose_and = hydra.main(version_base=None, config_path=str(Path(__file__).parent / "configs"), config_name="train")
    try:
        compose_and(lambda composed: run_job(composed, ranks, jobs))()
    except (HydraException, OmegaConfBaseException) as error:
        fail(ranks, compose.explain(error))
    except KeyboardInterrupt:  # before the loop began, or in the middle of a set-up
        sys.exit(130)
    except Exception:
        if ranks.first_to_fail():
            raise
        sys.exit(1)
    ranks.stop()
    if len(jobs) > 1 and ranks.main:
        print(sweep_table(jobs))
    if any(job.error for job in jobs):
        sys.exit(1)


if __name__ == "__main__":
    main()
