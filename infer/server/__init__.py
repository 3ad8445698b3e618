"""A server that other programs talk to as to OpenAI's: completions and chat over HTTP.

=============  ====================================================================================
``schemas``    what a client may ask for, checked by hand
``errors``     what a client is told when it may not
``worker``     the engine in a thread of its own, and what it hands to the event loop
``responses``  generated pieces as OpenAI's objects
``metrics``    counters, gauges and histograms as Prometheus reads them
``service``    model, tokenizer and limits: calls to requests of the engine
``app``        the endpoints
``run``        the socket, the signals, and the server from its start to its end
=============  ====================================================================================

Nothing is imported here; ``app`` needs the package starlette and ``run`` uvicorn, of the extra
``serve``.
"""
