"""The transformer and its files.

==========================  ======================================================================
``models.config``           ``ModelConfig``: sizes, checked
``models.transformer``      ``Transformer``: forward, backward, one step with a cache
``models.cache``            ``KVCache``
``models.paged_cache``      ``PagedKVCache``: room for the keys and values of many texts
``models.ragged``           ``prefill_logits``, ``decode_logits``: one pass for several texts
``models.checkpoint``       ``save_model``, ``load_model``, ``resolve_checkpoint``
``models.sparse_tensors``   how sparse feedforward weights stand in a file
``models.tokenizer``        ``ByteTokenizer``, ``BPETokenizer``, ``load_tokenizer``
``models.chat_template``    ``render_chat``, ``encode_chat``: conversations by a model's template
``models.gguf_reader``      ``read_gguf``
``models.gguf_writer``      ``write_gguf``
``models.reading``          why a file cannot be read
==========================  ======================================================================

Nothing is imported here, so that a config can be read without loading any kernel.
"""
