"""Train a language model: `python train.py`, and any key=value of configs/schema.py to change the run."""

import os
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import hydra
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from configs import compose
from configs.schema import TrainConfig, register
from data.batches import Windows
from data.prepare import Corpus, prepare
from model import ModelConfig, Sampling, Transformer, generate
from training.batches import Batches, check_batch
from training.device import choose_device, choose_dtype
from training.evaluate import evaluate
from training.flops import flops_per_token, matmul_peak
from training.objective import NextTokenLoss
from training.optimizer import clip_gradients, make_optimizer, set_learning_rate
from training.ranks import Ranks
from training.reporting import Report, StepReport, start_wandb
from training.run import Progress, RunFolder, StopRequest, named_optimizer_state, restore_optimizer_state
from training.schedule import learning_rate_share
from training.update import Precision, accumulate, require_finite
from weights import checkpoint, load


def train(config: TrainConfig) -> int:
    """Run to the end, or to a signal; returns the exit status. Raises ValueError or OSError, in one line, for what cannot be done."""
    ranks = Ranks.from_environment()
    device = choose_device(config.device, ranks.local_rank)
    precision = Precision(device, choose_dtype(config.dtype, device))
    micro_batch_size = check_batch(config.batch_size, config.micro_batch_size, ranks.world)
    progress, trainer = Progress(), {}
    start = resume_point(config)
    if start is not None:
        trainer = checkpoint.read_trainer(start)
        progress = Progress(**trainer["progress"])

    model, corpus = build(config, start)
    model.to(device)
    objective = NextTokenLoss(model)
    validation = Windows(corpus.val, model.config.context_length, seed=None)
    if config.eval_only:
        found = evaluate(objective, validation, micro_batch_size, ranks, config.eval_windows)
        print(
            f"validation loss {found.loss:.4f} | perplexity {found.perplexity:.2f} | {found.bits_per_byte:.4f} bits per byte"
        )
        return 0
    if progress.step >= config.steps:
        print(f"{config.run_dir} is finished: {progress.step} of steps={config.steps} are done. Raise steps to go on")
        return 0

    optimizer = make_optimizer(config.optimizer, model)
    if trainer:
        restore_optimizer_state(optimizer, model, trainer["optimizer"])
        precision.scaler.load_state_dict(trainer["scaler"])
    windows = Windows(corpus.train, model.config.context_length, config.seed)
    batches = Batches(windows, config.batch_size, micro_batch_size, ranks, device)
    if config.compile:
        objective.compile()
    wrapped = ranks.wrap(objective)

    folder = (
        RunFolder.reopen(Path(config.run_dir))
        if start or config.resume
        else RunFolder.create(config.run_dir, config.overwrite)
    )
    folder.cut_metrics(progress.step)
    folder.config.write_text(compose.to_yaml(replace(config, run_dir=str(folder.path), model=model.config)))
    wandb_run = start_wandb(config.wandb, folder, progress, asdict(config))
    tokens_per_step = config.batch_size * model.config.context_length
    peak = matmul_peak(device, precision.dtype) * ranks.world
    report = Report(folder, wandb_run, progress, config.steps, tokens_per_step, flops_per_token(model), peak, device)
    stop = StopRequest()

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": named_optimizer_state(optimizer, model),
            "scaler": precision.scaler.state_dict(),
        }
        about = {
            "step": progress.step,
            "tokens": progress.position * model.config.context_length,
            "best_val_loss": progress.best_loss,
        }
        folder.save(progress, model.config, state, corpus.tokenizer, about, config.keep_checkpoints)
        report.draw()

    report.say(
        f"{folder.path}: {sum(p.numel() for p in model.parameters()):,} parameters, {config.steps:,} steps of {tokens_per_step:,} tokens"
    )
    saved = progress.step
    try:
        while progress.step < config.steps and not stop.requested:
            began = time.perf_counter()
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
            report.timed(time.perf_counter() - began)

            last = progress.step == config.steps
            if progress.due(config.log_every):
                report.step(progress, StepReport(loss, norm, share * config.optimizer.lr))
            best = False
            if progress.due(config.eval_every) or last:
                found = evaluate(objective, validation, micro_batch_size, ranks, config.eval_windows)
                best = progress.improved(found.loss)
                report.evaluation(progress, found, best)
            if progress.due(config.sample_every) or last:
                report.sample(progress, sample(model, corpus, config.prompt))
            if progress.due(config.save_every) or best or last:
                save()
                saved = progress.step
        if saved != progress.step:
            save()
    finally:
        report.close(progress)
        ranks.stop()
    if stop.signal is not None and progress.step < config.steps:
        print(f"stopped at step {progress.step}, saved: python train.py resume={folder.path} goes on", file=sys.stderr)
        return 128 + stop.signal
    print(f'{folder.path} is done: python sample.py --checkpoint {folder.path} --prompt "..."')
    return 0


def resume_point(config: TrainConfig) -> Path | None:
    """The checkpoint to go on from; None for a new run, or one that ended before its first checkpoint."""
    if not config.resume:
        return None
    try:
        return checkpoint.find(Path(config.resume))
    except FileNotFoundError:
        return None


def build(config: TrainConfig, start: Path | None) -> tuple[Transformer, Corpus]:
    """The model, new or from a checkpoint, and the tokens in its vocabulary."""
    if config.init_from is not None:
        model, tokenizer = load(config.init_from, dtype=torch.float32)
        return model, prepare(config.data, tokenizer, model.config.context_length)
    corpus = prepare(config.data, config.tokenizer, config.model.context_length)
    model_config = with_vocabulary(config.model, corpus)
    if start is not None:
        refuse_changes(start, model_config, corpus)
        return checkpoint.load_model(start), corpus
    torch.manual_seed(config.seed)
    return Transformer(model_config), corpus


def with_vocabulary(model_config: ModelConfig, corpus: Corpus) -> ModelConfig:
    needed = corpus.tokenizer.n_vocab
    if model_config.vocab_size is not None and model_config.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size={model_config.vocab_size} is too small for tokenizer {corpus.tokenizer.name}, "
            f"whose largest id is {needed - 1}: use at least {needed}, or null to take it from the tokenizer"
        )
    return replace(model_config, vocab_size=model_config.vocab_size or needed)


def refuse_changes(start: Path, wanted: ModelConfig, corpus: Corpus) -> None:
    """A checkpoint can go on only with its own architecture and tokenizer."""
    was, now = asdict(checkpoint.model_config(start)), asdict(wanted)
    changed = [f"model.{key}: {was[key]} -> {now[key]}" for key in was if was[key] != now[key]]
    tokenizer = checkpoint.load_tokenizer(start)
    if tokenizer.fingerprint != corpus.tokenizer.fingerprint:
        changed.append(
            f"tokenizer: {tokenizer.name} ({tokenizer.n_vocab} ids) -> {corpus.tokenizer.name} ({corpus.tokenizer.n_vocab} ids)"
        )
    if changed:
        raise ValueError(
            f"{start} was trained with another {'; '.join(changed)}: drop these overrides, or start a new run"
        )


def sample(model: Transformer, corpus: Corpus, prompt: str, n_tokens: int = 100) -> str:
    tokenizer = corpus.tokenizer
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    sampling = Sampling(temperature=0.8, top_k=50)
    new = generate(
        model, [ids], n_tokens, sampling=sampling, n_vocab=tokenizer.n_vocab, stop_ids=[tokenizer.end_of_text]
    )[0]
    return prompt + tokenizer.decode([token for token in new if token != tokenizer.end_of_text])


@hydra.main(version_base=None, config_path=str(Path(__file__).parent / "configs"), config_name="train")
def hydra_job(composed: DictConfig) -> None:
    try:
        status = train(compose.to_config(composed))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {one_line(error)}")
    except torch.OutOfMemoryError as error:
        sys.exit(
            f"error: out of memory ({one_line(error)[:120]}): lower micro_batch_size, model.context_length or the model's size"
        )
    if status:
        sys.exit(status)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def main() -> None:
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise here, rather than print a traceback and a hint
    warnings.filterwarnings("ignore", module="hydra")
    try:
        hydra_job()
    except (HydraException, OmegaConfBaseException) as error:
        cause = f": {one_line(error.__cause__)}" if error.__cause__ else ""
        sys.exit(f"error: {one_line(error)}{cause}")


if __name__ == "__main__":
    main()
