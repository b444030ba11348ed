"""Trains a small byte-level GPT on real text with `cute_fa.flash_attn_func`; `cute-fa train` is its command line.

From Python, without files or display:

    from cute_fa.examples.train_gpt.train_config import preset
    from cute_fa.examples.train_gpt.trainer import Trainer

    trainer = Trainer(preset("cpu", steps=40))
    for result in trainer.run():
        print(result.step, result.loss)

`train_config` says what is trained, `data` is the text, `model` the GPT, `trainer` the steps, `run_folder` what a run
leaves on disk, `loss_plot` its picture and `interrupt` the way to stop early.
"""
