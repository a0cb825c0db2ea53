"""The stages of a run, a file each, called after their commands: each reads files of the run and writes files of it.

All that can be wrong with the input is found before the first file is written. A stage that is current (same inputs,
options and version) is passed over, so the same command goes on where it was killed, and another method chooses again
without measuring again. `pipeline.stages` has them all as values: what each reads, writes and depends on; what they
share is in `shared`.

In the order of work:

    corpus           texts to the windows that are calibrated on, and those held out
    measure          the float model on the windows, by one process or several ranks; and on other text
    quantize         scales from statistics, and the checkpoint they make
    queries          `export --attention fp8`: the queries of attention, measured
    export           both graphs beside the checkpoint, linted
    export_baseline  the same model in BF16 or INT8, to compare with
    build_engine     engines, also of those, and the proof of what they run
    validate         the held-out text through the runtimes, and the gate on what is lost
    triton           the model repository, and in it the plain model of an engine
    sensitivity      the loss that each tensor causes alone
    tune             the cheapest mix that meets a budget of loss, and the run made anew by it
    tune_candidates  its choices: their scales, codes and predicted losses
    bench            the time that answers take, in each precision and beside other runs
    continuations    text that BF16 and FP8 write after the same words, for the report
    report           the run as a page and a notebook, beside other runs

They write nothing:

    generate         text from the FP8 model, from the BF16 model it was made of, or from both
    other_text       text that the run was not calibrated on, read as its own was

The commands that join stages, or only read what they wrote, in `commands`:

    calibrate        model and text to checkpoint and graphs, by one process or several ranks
    run              all stages, one after the other
    merge            runs that were measured apart, added: corpus and measurement, and what follows
    rescale          scales chosen again, or graphs in another precision
    preflight        what later stages would refuse, told before the first one writes
    inspect          every module, and what stands out
    doctor           the stability checklist, a verdict each
    engine           what engines run, read from them anew
    serve            the FP8 model behind OpenAI's API, and the BF16 model beside it
    lint             an ONNX file, a Triton repository, a checkpoint or all of a run against the rules
"""
