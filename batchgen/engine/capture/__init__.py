"""Values captured in addition to tokens: hidden states, routed experts, prompt logprobs."""
