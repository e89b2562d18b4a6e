"""Arrays of networks."""


def arrays_of(net):
    """Return the values of a network's parameters by name."""
    return {name: p.data().asnumpy() for name, p in net.collect_params().items()}


def gradients_of(net):
    """Return the gradients of a network by name, and its running statistics, which have none."""
    return {
        name: (p.data() if p.grad_req == 'null' else p.grad()).asnumpy()
        for name, p in net.collect_params().items()
    }
