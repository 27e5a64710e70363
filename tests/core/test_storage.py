"""The storage dim against rows distributed one by one: the first dim that gives every device the same number of rows."""

from __future__ import annotations

from random import Random

from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import Initializer, Weight
from shardwright.core.resolution.storage import StorageChoice, choose_storage
from shardwright.files import parse_yaml

NAMES = ("embed", "mlp", "heads")


def weight_of(sizes: dict[str, int], storage: tuple[str, ...]) -> Weight:
    return Weight(
        name="w",
        component="mlp",
        logical_axes=tuple(sizes),
        shape=tuple(sizes.values()),
        initializer=Initializer(kind="zeros"),
        contracted=(),
        storage=storage,
    )


def layout_of(wanted: dict[str, tuple[str, ...]], mesh: Mesh) -> Layout:
    """Storage axes, each with the dims that it tries before those of the table."""
    options = {axis: f", weights: [{', '.join(names)}]" if names else "" for axis, names in wanted.items()}
    roles = "".join(f"  {axis}: {{elsewhere: fsdp{options.get(axis, '')}}}\n" for axis in mesh.names)
    sizes = ", ".join(f"{axis.name}: {axis.size}" for axis in mesh.axes)
    return read_layout(parse_yaml(f"name: mine\nmesh: {{{sizes}}}\nroles:\n{roles}", "mine.yaml"))


def is_even(rows: int, sizes: list[int]) -> bool:
    """Whether rows distributed over one axis after the other give each device the same number."""
    shards = [list(range(rows))]
    for size in sizes:
        shards = [shard[number::size] for shard in shards for number in range(size)]
    return len({len(shard) for shard in shards}) == 1


def by_distributing(
    weight: Weight, wanted: dict[str, tuple[str, ...]], mesh: Mesh, in_use: dict[str, list[str]]
) -> tuple[StorageChoice, ...]:
    lists = {axis: (*own, *(n for n in weight.storage if n not in own)) for axis, own in wanted.items()}
    axes_of = {name: list(axes) for name, axes in in_use.items()}
    found = []
    for tried in dict.fromkeys(lists.values()):
        axes = tuple(axis for axis in lists if lists[axis] == tried)
        even = [n for n in tried if is_even(weight.size(n), [mesh.size(a) for a in (*axes_of[n], *axes)])]
        found.append(StorageChoice(axes=axes, tried=tried, granted=even[0] if even else None))
        if even:
            axes_of[even[0]] += axes
    return tuple(found)


def test_every_axis_on_a_dim_counts_for_whether_it_divides() -> None:
    mesh = Mesh.of(fsdp=4, other=2, tensor=3, third=2)
    layout = layout_of({"fsdp": ("embed", "heads"), "other": ("embed", "mlp")}, mesh)
    weight = weight_of({"embed": 12, "mlp": 8, "heads": 32}, ("embed",))

    def granted(**in_use: list[str]) -> list[str | None]:
        axes_of = {name: in_use.get(name, []) for name in NAMES}
        return [c.granted for c in choose_storage(weight, layout, mesh, "jax", ["fsdp", "other"], axes_of)]

    # 4 divide 12; then 4 x 2 do not, and 2 divide 8.
    assert granted() == ["embed", "mlp"]
    # 3 x 4 divide 12 as well.
    assert granted(embed=["tensor"]) == ["embed", "mlp"]
    # 3 x 2 x 4 do not, and 3 x 2 x 2 do.
    assert granted(embed=["tensor", "third"]) == ["heads", "embed"]


def test_storage_dims_of_random_weights_agree_with_distributing_their_rows() -> None:
    random = Random(0)
    refused = after_another = after_use = 0
    for _ in range(1500):
        mesh = Mesh.of(a=random.choice((2, 3, 4)), b=random.choice((2, 3)), c=random.choice((2, 4)))
        sizes = {name: random.choice((4, 6, 8, 12, 18, 24, 36)) for name in NAMES}
        weight = weight_of(sizes, tuple(random.sample(NAMES, random.randint(1, 3))))
        wanted = {axis: tuple(random.sample(NAMES, random.randint(0, 2))) for axis in ("a", "b")}
        in_use: dict[str, list[str]] = {name: [] for name in NAMES}
        if random.random() < 0.7:
            in_use[random.choice(NAMES)] = ["c"]
        given = (weight, layout_of(wanted, mesh), mesh, "jax", ["a", "b"])
        found = choose_storage(*given, in_use)
        assert found == by_distributing(weight, wanted, mesh, in_use), (
            str(mesh),
            sizes,
            weight.storage,
            wanted,
            in_use,
        )
        refused += any(choice.granted is None for choice in found)
        after_another += len(found) == 2 and found[0].granted == found[1].granted is not None
        after_use += found != choose_storage(*given, {name: [] for name in NAMES})
    assert min(refused, after_another, after_use) > 50, (refused, after_another, after_use)


def test_pytorch_shards_dim_0_whether_it_divides_or_not() -> None:
    mesh = Mesh.of(fsdp=8)
    weight = weight_of({"embed": 12, "mlp": 24}, ("embed",))
    found = choose_storage(weight, layout_of({"fsdp": ()}, mesh), mesh, "torch", ["fsdp"], {"embed": [], "mlp": []})
    assert found == (StorageChoice(axes=("fsdp",), tried=("embed",), granted="embed"),)
