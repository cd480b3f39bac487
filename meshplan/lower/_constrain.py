"""Write a plan into the program: the jaxpr is evaluated again with every value constrained.

Scan, while and cond bodies and rematerialised blocks are bound again with constrained
bodies; calls are opened; custom derivative rules are gone after differentiation. A value
that an operation wants in another spec is moved there step by step, once for all that want
it in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshplan.core import Spec, _jax, _jax_local, _jax_pins
from meshplan.lower._guard import guarded, has_batch_of_one, transformed
from meshplan.lower._local import Local
from meshplan.program import Key

Path = tuple[Spec, ...]
ENTERS = -5  # below the key of a rematerialised block: its operands on their way in


@dataclass(frozen=True, slots=True)
class Constraints:
    """By the operation's key: `results[key, r]` the specs a result goes through when it is made,
    `uses[key, k]` the specs an operand goes through before it is used; `local[key]`: it runs on the shards;
    `fills[key, k]`: the operand is given the result's shape first, and goes through these specs."""

    results: Mapping[tuple[Key, int], Path]
    uses: Mapping[tuple[Key, int], Path]
    local: Mapping[Key, Local] = field(default_factory=dict)
    fills: Mapping[tuple[Key, int], Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a jaxpr under constraints on a mesh. `moved` remembers moves made in one body, so that equal ones
    are made once; keys are those that `meshplan.program` gave the equations."""

    constraints: Constraints
    mesh: Any

    def constrain(self, x: Any, path: Path) -> Any:
        """`x` through the specs one after the other."""
        for spec in path:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec.partition_spec()))
        return x

    def use(self, x: Any, key: Key, k: int, moved: dict[Any, Any]) -> Any:
        """`x` as operand k of the operation wants it; equal moves in one body are made once."""
        for spec in self.constraints.uses.get((key, k), ()):
            place = (id(x), spec)
            if place not in moved:
                moved[place] = (x, self.constrain(x, (spec,)))  # x is kept so that its id stays its own
            x = moved[place][1]
        return x

    def made(self, outs: Sequence[Any], key: Key) -> list[Any]:
        """Results as the operation is to leave them."""
        return [self.constrain(x, self.constraints.results.get((key, r), ())) for r, x in enumerate(outs)]

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], prefix: Key, moved: dict[Any, Any]
    ) -> list[Any]:
        """The jaxpr's results; `prefix` is the key of the equation whose body it is."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else env[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            outs = self.equation(eqn, [read(a) for a in eqn.invars], (*prefix, i), moved)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: Any, args: list[Any], key: Key, moved: dict[Any, Any]) -> Sequence[Any]:
        """Results of one equation on operands that are as they were made."""
        with _jax.user_source(eqn):  # so that the compiler's collectives name the user's line
            return self.constrained_equation(eqn, args, key, moved)

    def constrained_equation(self, eqn: Any, args: list[Any], key: Key, moved: dict[Any, Any]) -> Sequence[Any]:
        """Calls opened, loops, branches and rematerialised blocks with constrained bodies, the rest bound again."""
        body = _jax.call_body(eqn)
        if body is not None:
            inner, consts = _jax.open_jaxpr(body)
            return self.run(inner, consts, _jax.call_operands(eqn, args), key, moved)
        if _jax.is_remat(eqn):
            return self.remat(eqn, [self.use(x, (*key, ENTERS), k, moved) for k, x in enumerate(args)], key)
        opener = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(eqn.primitive.name)
        if opener is not None:
            return opener(eqn, args, key, moved)
        wanted = [self.use(x, key, k, moved) for k, x in enumerate(args)]
        if _jax_pins.only_moves(eqn):  # the user's own, for another mesh perhaps: the plan's spec instead
            return self.made(wanted, key)
        wanted = [self.filled(x, eqn, (key, k)) for k, x in enumerate(wanted)]
        outs = self.made(self.bound(eqn, wanted, key), key)
        pinned = (*key, -4, 0)
        return [*self.made([self.use(x, pinned, 0, moved) for x in outs[:1]], pinned), *outs[1:]]

    def filled(self, x: Any, eqn: Any, place: tuple[Key, int]) -> Any:
        """An operand that is repeated along some dims, in the result's shape where the plan says so."""
        path = self.constraints.fills.get(place)
        if path is None:
            return x
        shape = eqn.outvars[0].aval.shape
        return self.constrain(jax.lax.broadcast_in_dim(x, shape, range(len(shape))), path)

    def bound(self, eqn: Any, args: Sequence[Any], key: Key) -> Sequence[Any]:
        """Results of an equation that is bound again, on the shards where it is to run there."""
        local = self.constraints.local.get(key)
        args = guarded(eqn, args, self.mesh.size) if self.mesh is not None else args
        if local is None and self.mesh is not None and eqn.primitive.name == "shard_map":
            return _jax_local.bind_over(eqn, args, self.mesh)
        if local is None and has_batch_of_one(eqn):
            return transformed(eqn, args[0])
        if local is None:
            return _jax.bind(eqn, args, {})
        return _jax_local.bind_on_shards(eqn, args, local.run, self.mesh, local.operands, local.results)

    def remat(self, eqn: Any, args: list[Any], key: Key) -> Sequence[Any]:
        """Bound again with its policy, so that the compiler does not merge the recomputation away."""
        inner, consts = _jax.open_jaxpr(eqn.params["jaxpr"])
        body = self.retrace(inner, lambda *xs: self.run(inner, consts, xs, key, {}))
        closed = _jax.body_like(eqn.params["jaxpr"], body, detached=True)
        return _jax.bind(eqn, args, {"jaxpr": closed[0]}, closed[1])

    def scan(self, eqn: Any, args: list[Any], key: Key, moved: dict[Any, Any]) -> Sequence[Any]:
        """Carries have one spec before, in and after the loop; slices and stacks are constrained in the body too."""
        n_consts, n_carry = _jax.scan_counts(eqn.params)
        inner, consts = _jax.open_jaxpr(eqn.params["jaxpr"])
        fixed, inits, stacks = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
        inits = [self.enter_carry(x, key, k, moved) for k, x in enumerate(inits)]
        stacks = [self.use(x, (*key, -2, k), 0, moved) for k, x in enumerate(stacks)]

        def body(*xs: Any) -> list[Any]:
            inside: dict[Any, Any] = {}
            carries = [self.made([x], (*key, -1, k))[0] for k, x in enumerate(xs[n_consts : n_consts + n_carry])]
            slices = [self.made([x], (*key, -2, k))[0] for k, x in enumerate(xs[n_consts + n_carry :])]
            outs = self.run(inner, consts, [*xs[:n_consts], *carries, *slices], key, inside)
            back = [self.leave_carry(x, key, k, inside) for k, x in enumerate(outs[:n_carry])]
            return back + [self.use(x, (*key, -3, k), 0, inside) for k, x in enumerate(outs[n_carry:])]

        new, extra = _jax.body_like(eqn.params["jaxpr"], self.retrace(inner, body))
        assert not extra, "a scan body closes over no new arrays"
        outs = _jax.bind(eqn, [*fixed, *inits, *stacks], {"jaxpr": new})
        finals = [self.made([x], (*key, -1, k))[0] for k, x in enumerate(outs[:n_carry])]
        return finals + [self.made([x], (*key, -3, k))[0] for k, x in enumerate(outs[n_carry:])]

    def enter_carry(self, x: Any, key: Key, k: int, moved: dict[Any, Any]) -> Any:
        """The initial value of carry k on its way into the loop."""
        carry = (*key, -1, k)
        return self.made([self.use(x, carry, 0, moved)], carry)[0]

    def leave_carry(self, x: Any, key: Key, k: int, inside: dict[Any, Any]) -> Any:
        """What the body makes of carry k on its way back to the body's beginning."""
        carry = (*key, -1, k)
        return self.made([self.use(x, carry, 1, inside)], carry)[0]

    def while_loop(self, eqn: Any, args: list[Any], key: Key, moved: dict[Any, Any]) -> Sequence[Any]:
        """As `scan`; the condition reads the carries as they are."""
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, cond_consts = _jax.open_jaxpr(eqn.params["cond_jaxpr"])
        body, body_consts = _jax.open_jaxpr(eqn.params["body_jaxpr"])
        inits = [self.enter_carry(x, key, k, moved) for k, x in enumerate(args[n_cond + n_body :])]

        def new_cond(*xs: Any) -> list[Any]:
            return self.run(cond, cond_consts, xs, (*key, 0), {})

        def new_body(*xs: Any) -> list[Any]:
            inside: dict[Any, Any] = {}
            carries = [self.made([x], (*key, -1, k))[0] for k, x in enumerate(xs[n_body:])]
            outs = self.run(body, body_consts, [*xs[:n_body], *carries], (*key, 1), inside)
            return [self.leave_carry(x, key, k, inside) for k, x in enumerate(outs)]

        params = {
            "cond_jaxpr": _jax.body_like(eqn.params["cond_jaxpr"], self.retrace(cond, new_cond))[0],
            "body_jaxpr": _jax.body_like(eqn.params["body_jaxpr"], self.retrace(body, new_body))[0],
        }
        outs = _jax.bind(eqn, [*args[: n_cond + n_body], *inits], params)
        return [self.made([x], (*key, -1, k))[0] for k, x in enumerate(outs)]

    def cond(self, eqn: Any, args: list[Any], key: Key, moved: dict[Any, Any]) -> Sequence[Any]:
        """Every branch leaves its results as the merged result is wanted."""
        branches = []
        for b, branch in enumerate(eqn.params["branches"]):
            inner, consts = _jax.open_jaxpr(branch)

            def body(*xs: Any, inner: Any = inner, consts: Any = consts, b: int = b) -> list[Any]:
                inside: dict[Any, Any] = {}
                outs = self.run(inner, consts, xs, (*key, b), inside)
                return [self.use(x, (*key, -3, k), b, inside) for k, x in enumerate(outs)]

            branches.append(_jax.body_like(branch, self.retrace(inner, body))[0])
        outs = _jax.bind(eqn, args, {"branches": tuple(branches)})
        return [self.made([x], (*key, -3, k))[0] for k, x in enumerate(outs)]

    @staticmethod
    def retrace(inner: Any, body: Callable[..., list[Any]]) -> Any:
        """`body` traced on the shapes of the arguments of the body it replaces."""
        return jax.make_jaxpr(body)(*[_jax.abstract(v.aval) for v in inner.invars])


def constrained(jaxpr: Any, constraints: Constraints, mesh: Any) -> Callable[..., list[Any]]:
    """A function of the flat arguments that computes the jaxpr's flat results under the constraints."""
    inner, consts = _jax.open_jaxpr(jaxpr)
    evaluator = Evaluator(constraints, mesh)

    def flat(*args: Any) -> list[Any]:
        return evaluator.run(inner, consts, args, (), {})

    return flat
