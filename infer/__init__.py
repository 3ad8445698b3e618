"""Using a trained model.

=========================  ========================================================================
``infer.generate``         ``generate``: text, piece by piece
``infer.sampling``         ``sample``: the next token from logits
``infer.text_stream``      ``TextStream``: whole characters from bytes
``infer.chat``             ``Conversation``: messages, answers, and a history that fits the context
``infer.server``           completions and chat over HTTP, as OpenAI's API has them
``infer.evaluate``         ``evaluate``: loss and sparsity on given text
``infer.questions``        ``read_questions``: files of multiple-choice questions
``infer.multiple_choice``  ``answer_questions``: how many a model answers rightly
``infer.prune``            cutting off the smallest feedforward weights
``infer.convert``          ``convert``: another weight format, or no dead neurons
``infer.describe``         what a checkpoint or a saved matrix holds
``infer.benchmark``        each execution path timed against dense
``infer.signals``          signals that a program takes for a while, also one that trains
=========================  ========================================================================

Nothing is imported here, so that each part loads only what it needs.
"""
