"""`kvstore pd-router`: one OpenAI-compatible address in front of prefill and decode instances of vLLM.

A request takes two steps. A prefill instance computes the prompt, stores its KV blocks in kvstore, and answers with the
prompt's token ids. A decode instance gets the same request with those ids, so that it neither applies the chat template
nor tokenizes, loads the blocks, and its answer is the client's. Whatever goes wrong in the first step costs time: the
second one is then sent without it.

Modules
    settings    the flags, checked
    flow        the bodies of the two steps          (no I/O)
    instances   who is up, who has least to do
    upstream    one call of an instance; what an instance's failure means
    metrics     Prometheus
    server      the HTTP service, composed of those
"""
