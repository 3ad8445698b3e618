"""A server that other programs talk to as to OpenAI's: completions and chat over HTTP.

==============  ====================================================================================
``fields``      fields of a request's JSON, each checked by hand
``schemas``     what a client may ask for
``errors``      what a client is told when it may not
``worker``      the engine in a thread of its own, and what it hands to the event loop
``responses``   generated pieces as OpenAI's objects
``metrics``     counters, gauges and histograms as Prometheus reads them
``service``     model, tokenizer and limits: calls to requests of the engine
``app``         the endpoints
``gate``        what every request passes first: host, key, counting
``connection``  connections that end where no request comes
``run``         the socket, the signals, and the server from its start to its end
``packages``    whether the packages of the extra ``serve`` are there
==============  ====================================================================================

Nothing is imported here; ``app`` and ``gate`` need the package starlette, ``connection`` and
``run`` uvicorn, of the extra ``serve``.
"""
