"""Train a language model: `python train.py`, and any key=value of configs/schema.py to change the run."""

import gc

gc.disable()  # imports make a million objects and no garbage: looking for some, now and at exit, takes a quarter of the start

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial

import weights
from configs import compose
from configs.schema import TrainConfig
from data.batches import Windows
from data.prepare import prepare
from model import Sampling
from sampling import complete
from training.batches import Batches, check_batch
from training.device import choose_device, choose_dtype, set_up, try_compiled
from training.evaluate import evaluate
from training.flops import flops_per_token, matmul_peak
from training.launch import Outcome, launch
from training.objective import NextTokenLoss, recompute_blocks
from training.optimizer import clip_gradients, make_optimizer, set_learning_rate
from training.plan import make_plan, prediction, timed, update
from training.plan_ranks import rank_plans
from training.ranks import Ranks, callable_in_parts
from training.reporting import Report, check_wandb, load_libraries, start_wandb
from training.run import StopRequest, check_run_dir, open_folder
from training.schedule import learning_rate_share
from training.start import Start, trained_state, with_vocabulary
from training.update import Precision, accumulate, require_finite

gc.freeze()
gc.enable()


def train(config: TrainConfig, ranks: Ranks) -> Outcome:
    """Run to the end, or to a signal. Raises ValueError or OSError, in one line, for what cannot be done."""
    began = time.perf_counter()
    say: Callable[..., None] = print if ranks.main else lambda *what, **how: None
    device = choose_device(config.device, ranks.local_rank)
    set_up(device, config.compile)
    precision = Precision(device, choose_dtype(config.dtype, device))
    planned = Ranks(world=config.plan_ranks) if config.dry_run and config.plan_ranks else ranks
    micro_batch_size = check_batch(config.batch_size, config.micro_batch_size, planned.world)
    check_wandb(config.wandb)
    if not (config.dry_run or config.eval_only):
        check_run_dir(config.run_dir, bool(config.resume), config.overwrite)
    if config.parallel == "fsdp" and ranks.world == 1:
        say("parallel=fsdp is ignored: this is the only process (torchrun --nproc_per_node=N starts N)", file=sys.stderr)

    start = Start(config.resume, config.init_from, needs_model=config.eval_only)
    progress, context = start.progress, config.model.context_length
    if progress.step >= config.steps and not (config.eval_only or config.dry_run):
        say(f"{config.run_dir} is finished: {progress.step} of steps={config.steps} are done. Raise steps to go on")
        return Outcome(0, str(config.run_dir), progress.best_loss)
    quiet = None if ranks.main else say
    corpus = ranks.main_first(lambda: prepare(config.data, start.tokenizer() or config.tokenizer, context, quiet))
    tokenizer = corpus.tokenizer
    if progress.corpus not in ("", corpus.folder.name) and not config.eval_only:
        say(f"the data is not that of step {progress.step}: {progress.corpus} -> {corpus.folder.name}", file=sys.stderr)
    progress.corpus = corpus.folder.name
    config = replace(config, model=with_vocabulary(config.model, tokenizer))
    validation = Windows(corpus.val, context, seed=None)
    batches = Batches(Windows(corpus.train, context, config.seed), config.batch_size, micro_batch_size, planned, device)

    if config.dry_run:
        switches = (config.checkpoint_activations, config.separate_documents)
        make = partial(make_plan, config.model, config.optimizer, batches, precision, *switches)
        plan = make(config.steps - progress.step)
        say(plan)
        if planned.world > 1:
            say(*rank_plans(plan, make, config.model, batches, precision).values(), sep="\n")
        if planned is not ranks or ranks.highest(int(not plan.fits)):
            return Outcome()

    model = start.model(config.model, config.seed)
    objective = NextTokenLoss(model, tokenizer.end_of_text if config.separate_documents else None)
    if config.checkpoint_activations:
        recompute_blocks(model)
    wrapped = ranks.wrap(objective, config.parallel, device, precision.dtype)
    evaluation = partial(precision.autocast()(evaluate), objective, validation, micro_batch_size, ranks)
    if config.eval_only:
        found = evaluation(config.eval_windows)
        say(f"{found} | {found.n_targets:,} validation tokens of {corpus.folder}")
        return Outcome(val_loss=found.loss)
    if config.compile and (problem := try_compiled(objective, wrapped, batches.at(0)[0][0], precision.autocast())):
        say(f"compile=true does not work here ({problem}): going on without it", file=sys.stderr)
    load_libraries(config.wandb)
    optimizer = make_optimizer(config.optimizer, model)
    start.restore(model, optimizer, precision)
    if config.dry_run:
        step = timed(lambda: update(wrapped, optimizer, batches.at(0)[0], ranks, precision), ranks)
        windows = min(len(validation), config.eval_windows or len(validation))
        each = timed(lambda: evaluation(min(windows, 16)), ranks) / min(windows, 16)
        say(prediction(config.steps - progress.step, step, config.eval_every or config.steps, each * windows, device))
        return Outcome()

    with (
        open_folder(config.run_dir, bool(config.resume), config.overwrite) if ranks.main else nullcontext() as folder,
        StopRequest(ranks) as stop,
    ):
        config = replace(config, run_dir=ranks.agree(str(folder.path) if folder else None))
        wandb_run = start_wandb(config.wandb, folder, progress, asdict(config)) if folder else None
        if folder:
            if progress.step:
                say("; ".join([f"going on from step {progress.step}", *compose.changes(folder.config, config)]))
            folder.begin(compose.to_yaml(config, tokenizer), progress, start.folder if config.resume else None)
        tokens = config.batch_size * context
        peak = ranks.world * matmul_peak(device, precision.dtype) / flops_per_token(model)  # tokens a second

        def save() -> None:
            state = ranks.gather(trained_state(model, optimizer, precision))
            if folder:
                folder.save(progress, config.model, state, tokenizer, config.keep_checkpoints)
            report.saved()

        with Report(folder, wandb_run, progress, config.steps, tokens, peak, device, began) as report:
            size = f"{sum(p.numel() for p in model.parameters()):,} parameters, {config.steps:,} steps of {tokens:,} tokens"
            report.say(f"{config.run_dir}: {size} in {precision.dtype} on {device}".replace("torch.", ""))
            while progress.step < config.steps and stop.signal is None:
                share = learning_rate_share(config.schedule, progress.step, config.steps)
                set_learning_rate(optimizer, share)
                seed = (config.seed, progress.step)
                loss = accumulate(wrapped, *batches.at(progress.position), ranks=ranks, seed=seed, precision=precision).item()
                precision.scaler.unscale_(optimizer)
                norm = clip_gradients(model.parameters(), config.optimizer.grad_clip).item()
                require_finite(loss, norm, progress.step, precision.scaler)  # before the weights move
                precision.step(optimizer)
                progress.advance(config.batch_size)

                last, best = progress.step == config.steps, False
                report.step(loss, norm, share * config.optimizer.lr, log=progress.due(config.log_every) or last)
                if progress.due(config.eval_every) or last:
                    found = evaluation(config.eval_windows)
                    best = progress.improved(found.loss)
                    report.evaluation(found, best)
                if progress.due(config.sample_every) or last:
                    with callable_in_parts(objective):
                        text = complete(model, tokenizer, [config.prompt], 100, sampling=Sampling(temperature=0.8, top_k=50))
                    report.sample(config.prompt + text[0])
                if stop.requested() or last or best or progress.due(config.save_every or config.eval_every):
                    save()

    if stop.signal is not None and progress.step < config.steps:
        with suppress(OSError):  # of a terminal that is gone
            say(f"stopped at step {progress.step}, saved: python train.py resume={config.run_dir} goes on", file=sys.stderr)
        return Outcome(128 + stop.signal, str(config.run_dir), progress.best_loss)
    say(f'{config.run_dir} is done: python sample.py --checkpoint {config.run_dir} --prompt "..."')
    return Outcome(0, str(config.run_dir), progress.best_loss)


def main() -> None:
    launch(compose.jobs, lambda job, ranks: train(compose.to_config(job, weights.model_config, weights.tokenizer), ranks))


if __name__ == "__main__":
    main()
