"""What a network is made of, as `fuse_for_inference` needs to know it: which module feeds which, and who looks on."""

import inspect
from collections import Counter

import torch
import torch.nn.functional as F
from torch import fx, nn

from gsanet.layers.watched import has_hooks

RELU_FUNCTIONS = (F.relu, torch.relu, torch.relu_)


class Chains:
    """Which module feeds which, read from the traces of all `forward` methods that can be traced.

    Each module is traced with those that it calls as black boxes. Only what has one name, is called in one place, whose
    weights nobody reads and whose output goes to one place only can be merged with what comes next.

    Args:
        root: The network.
        wanted: The types of modules that it is about: what holds none of them is not traced.
    """

    def __init__(self, root: nn.Module, wanted: tuple[type[nn.Module], ...]):
        self.root = root
        self.nodes: dict[nn.Module, fx.Node] = {}
        self.owners: dict[fx.Node, nn.Module] = {}
        calls: Counter[nn.Module] = Counter()
        self.names: dict[nn.Module, list[str]] = {}
        for name, module in root.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)
        for container in root.modules():
            if not any(type(module) in wanted for module in container.modules() if module is not container):
                continue
            for node in _trace(container):
                if node.op == "call_module":
                    module = container.get_submodule(str(node.target))
                    calls[module] += 1
                    self.nodes[module], self.owners[node] = node, module
                elif node.op == "get_attr":  # a parameter that is used directly
                    owner, _, _ = str(node.target).rpartition(".")
                    calls[container.get_submodule(owner)] += 2
        self.calls = calls

    def modules(self, types: tuple[type[nn.Module], ...]) -> list[nn.Module]:
        """All modules of exactly these types."""
        return [module for module in self.root.modules() if type(module) in types]

    def before(self, module: nn.Module) -> nn.Module | None:
        """What feeds a module and nothing else."""
        if not self.is_single(module):
            return None
        node = self.nodes[module]
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            return None
        source = self.owners.get(node.args[0])
        if source is None or not self.is_single(source) or has_hooks(source) or len(node.args[0].users) != 1:
            return None
        return source

    def relu_after(self, module: nn.Module) -> bool:
        """Whether all that a module feeds is a ReLU."""
        users = list(self.nodes[module].users)
        if len(users) != 1:
            return False
        return type(self.owners.get(users[0])) is nn.ReLU or (
            users[0].op == "call_function" and users[0].target in RELU_FUNCTIONS
        )

    def leave_out_relu_after(self, module: nn.Module) -> bool:
        """Do so if it is a module that stands in this place only."""
        relu = self.owners.get(next(iter(self.nodes[module].users)))
        if relu is None or not self.is_single(relu) or has_hooks(relu):
            return False
        self.replace(relu, nn.Identity())
        return True

    def replace(self, module: nn.Module, other: nn.Module) -> None:
        """Put another in the place of a module, under all its names."""
        for name in self.names[module]:
            self.root.set_submodule(name, other)

    def is_single(self, module: nn.Module) -> bool:
        """Whether a module has one name and is called in one place."""
        return self.calls[module] == 1 and len(self.names[module]) == 1


class _OneLevel(fx.Tracer):
    """Every module that is called is a black box."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(module: nn.Module) -> list[fx.Node]:
    """The steps of a module's `forward`, with optional arguments left out; none if it cannot be traced."""
    attributes = dict(vars(module))
    try:
        parameters = inspect.signature(module.forward).parameters.values()
        optional = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        return list(_OneLevel().trace(module, concrete_args=optional or None).nodes)
    except Exception:  # anybody's code, run without tensors, may stop anywhere and anyhow
        return []
    finally:  # what it kept for later are no tensors either
        vars(module).clear()
        vars(module).update(attributes)
