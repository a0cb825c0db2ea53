"""The stages of a run, a file each, called after their commands: each reads files of the run and writes files of it.

All that can be wrong with the input is found before the first file is written. A stage that is current (same inputs,
options and version) is passed over, so the same command goes on where it was killed, and another method chooses again
without measuring again. `api` imports a stage once its run is open and its libraries are there, so a stage imports at
its top all that it computes with; those that also run without torch import torch's half where they use it.
`pipeline.stages` has them all as values: what each reads, writes and depends on; what they share is in `shared`.

In the order of work:

    corpus           from texts to calibration windows and evaluation tokens
    measure          the float model on the windows, by one process or several ranks; on other text; the queries of
                     attention, for `export --attention fp8` and `--q-scale`
    image_inputs     rows with images, read for a model, and its inputs of them
    costliest        the weights that stay in BF16 since they lose most in FP8, for `--bf16-weights`
    gradients        the weight of windows' first tokens in GPTQ's second moments, for `--weigh-first-token`, and the
                     gradients at outputs by which its codes are revised, for `--weigh-outputs`
    quantize         scales from statistics, and the checkpoint they make
    choice_notes     what a run says of its choices, where a user would not expect them
    forms            the cheapest form that meets the limit, where `fp8q run` was asked for none
    export           both ONNX graphs of the checkpoint, linted; the same model in BF16 or INT8, to compare with
    build_engine     engines of all graphs, and the proof of their FP8 GEMMs
    validate         the held-out text through the runtimes, and the gate on the loss
    validate_runtimes  its runtimes that may need torch, run one after the other
    compare          a server, or another checkpoint, asked for the evaluation text
    needles          sentences hidden in long prompts, asked of BF16 and FP8
    evaluate         lm-eval's tasks asked of BF16 and FP8, their answers paired
    triton           the Triton model repository, with a plain model of an engine
    distill          codes of weights, learned from the float model, by one process or several ranks
    distill_ranks    the ranks that learn together: what they cannot share, and the task that rank 0 hands on
    learned_adapter  a LoRA adapter, learned on the checkpoint from the float model
    sensitivity      the loss that each tensor causes alone
    tune             the cheapest mix within a budget of loss, and the run made anew with it
    bench            the time of answers, in each precision and of other runs
    continuations    the passages that FP8 and BF16 go on from, one model in memory after the other
    report           the run as a page and a notebook, compared with other runs, with continuations of the same prompts

They write nothing into a run:

    generate         text from the FP8 model, from its source model in BF16, or from both
    compare_endpoint  a server and the checkpoint that it is said to serve, without a run
    compare_pair     two checkpoints of one model on a text, without a run; its results have a directory of their own
    other_text       text other than the calibration text, read with the run's options
    convert          an FP8 checkpoint by a class or the names of tensors, without a run
    convert_plan     what would be wrong with it, found before its first byte
    convert_directory  its directory, which one call at a time writes
    push             a checkpoint and its card to the Hugging Face hub
    preflight        refuse, before the first stage writes, what calibration would refuse later
    inspect          every module, and the outliers
    doctor           the stability checklist with its verdicts
    engine           the kernels of engines, read from the engines
    load             the FP8 model as Hugging Face's, for lm-eval and notebooks
    serve            the FP8 model, and the BF16 model, by OpenAI's API
    lint             an ONNX file, a Triton repository, a checkpoint or all of a run against the rules

    cpu_time         the seconds of a token on this CPU, by those of calibrating
    plan             time, memory and disk of each stage of a run, before the first begins
    plan_rates       the pace of this machine, by a few tokens and GEMMs
    plan_images      the time of the part that sees, for rows with images

They join stages:

    calibrate        model and text to checkpoint and graphs, by one process or several ranks; scales chosen again
    loaded_model     the same of a model and texts that are in memory
    loaded_checks    refuse a model in memory that its files would not hold whole
    loaded_texts     texts in memory brought to one form, checked and written, with their images
    merge            add separately measured runs, then choose scales and export
    run              all stages, one after the other, refusing before the first what the later ones would
"""
