"""Real models under their layouts on real targets: the cases that are compiled and compared with their plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwright.cli.typed.options import PlanOptions
from shardwright.core.model.capacity import ROOM_FOR_ALL

TRAINED_IN_BF16 = {"weights_dtype": "bfloat16", "moments_dtype": "bfloat16", "dtype": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, with its options as on the command line. ``precision``: a recipe, or the path of a file. ``why``: the reason for the case."""

    model: str
    layout: str
    mesh: str
    chips: str
    batch: int
    length: int
    move: str | None = None
    set: str | None = None
    microbatches: int | None = None
    expert_buffer: float | None = None
    precision: str | None = None
    why: str = ""

    @property
    def name(self) -> str:
        """Unique, and valid as a file name."""
        extra = [part.replace("=", "-").replace(",", " ") for part in (self.move, self.set) if part]
        extra += [f"{self.microbatches} microbatches"] if self.microbatches else []
        extra += [f"buffer {self.expert_buffer:g}"] if self.expert_buffer else []
        extra += [Path(self.precision).stem] if self.precision else []
        return " ".join([self.model, self.layout, self.mesh.replace("=", ""), self.chips, *extra])

    @property
    def options(self) -> PlanOptions:
        return PlanOptions(
            mesh=self.mesh,
            chips=self.chips,
            batch=self.batch,
            length=self.length,
            move=self.move,
            set=((self.set,),) if self.set else (),
            microbatches=self.microbatches,
            # What docs show was compiled with room for the worst case.
            expert_buffer=self.expert_buffer or ROOM_FOR_ALL,
            precision=self.precision,
            # Whatever takes the least time by the numbers of a chip, these programs stay what they are.
            hops="two",
            **TRAINED_IN_BF16,
        )


def _on(targets: tuple[str, ...], **case) -> tuple[Case, ...]:
    return tuple(Case(chips=target, **case) for target in targets)


GPU, B200, V5P, V6E, CPU = "h100:1x8", "b200:1x8", "v5p:2x2x2", "v6e:2x4", "cpu:8"
MIXTRAL = {"model": "mixtral-8x7b", "batch": 8, "length": 2048, "set": "capacity_factor=1.25"}
LLAMA = {"model": "llama3-8b", "batch": 8, "length": 4096}
GATHERED = str(Path(__file__).parent / "fp8-current-gathered.yaml")
DEEPSEEK = {"model": "deepseek3-16b", "batch": 8, "length": 4096}

CASES: tuple[Case, ...] = (
    *_on((GPU, V5P, CPU), **MIXTRAL, layout="ep", mesh="expert=8", move="moe=all-to-all", why="tokens sent"),
    *_on((GPU, V5P, CPU), **MIXTRAL, layout="ep", mesh="expert=8", move="moe=weights", why="weights gathered"),
    *_on(
        (GPU,),
        **MIXTRAL,
        layout="ep",
        mesh="fsdp=2,expert=4",
        move="moe=ring",
        why="every token to every expert's device",
    ),
    *_on((GPU,), **MIXTRAL, layout="ep-as-cp", mesh="fsdp=2,expert=4", why="the sequence over the experts' axis"),
    *_on(("v6e:4x4",), **MIXTRAL | {"batch": 16}, layout="ep-as-cp", mesh="fsdp=4,expert=4", why="16 smaller chips"),
    *_on((GPU,), **MIXTRAL, layout="tp-as-ep", mesh="fsdp=2,tensor=4", why="experts where heads were"),
    *_on((GPU, V5P, V6E, CPU), **LLAMA, layout="fsdp", mesh="fsdp=8", why="the plainest"),
    *_on((GPU, V5P), **LLAMA, layout="hsdp", mesh="data=2,fsdp=4", why="replicas"),
    *_on(
        (GPU,),
        **LLAMA | {"batch": 16},
        layout="hsdp",
        mesh="data=2,fsdp=4",
        microbatches=2,
        why="replicas are summed once",
    ),
    *_on((GPU, V5P, B200), **LLAMA, layout="fsdp-tp", mesh="fsdp=2,tensor=4", why="two axes that shard a weight"),
    *_on((GPU, V5P), **LLAMA, layout="cp", mesh="fsdp=2,context=4", why="keys are gathered"),
    *_on((GPU, V5P), **LLAMA, layout="cp", mesh="fsdp=2,context=4", move="attention=ring", why="ring attention"),
    *_on((GPU,), **LLAMA, layout="cp", mesh="fsdp=2,context=4", move="attention=ulysses", why="heads for tokens"),
    *_on((GPU, V5P), **DEEPSEEK, layout="ep", mesh="fsdp=2,expert=4", why="a latent, and shared experts"),
    *_on(
        (GPU,),
        **DEEPSEEK,
        layout="ep-as-cp",
        mesh="fsdp=2,expert=4",
        move="attention=ring",
        why="ring attention of a latent",
    ),
    *_on((GPU, V6E), **LLAMA, layout="fsdp", mesh="fsdp=8", precision="fp8-current", why="a scale of each tensor"),
    *_on((GPU,), **LLAMA, layout="fsdp", mesh="fsdp=8", precision=GATHERED, why="weights sent as codes"),
    *_on((GPU, B200), **LLAMA, layout="fsdp-tp", mesh="fsdp=2,tensor=4", precision="mxfp8", why="scales of blocks"),
    *_on((V5P,), **LLAMA, layout="fsdp", mesh="fsdp=8", precision="fp8-block", why="larger blocks"),
    *_on((GPU,), **DEEPSEEK, layout="ep", mesh="fsdp=2,expert=4", precision="fp8-current", why="experts' scales"),
    *_on((B200,), **DEEPSEEK, layout="ep", mesh="fsdp=2,expert=4", precision="mxfp8", why="experts' blocks"),
)

SIXTEENTH = {"model": "deepseek3-671b", "chips": "v5p:4x4x8", "batch": 128, "length": 4096}
ON_512_CHIPS = {"model": "deepseek3-671b", "chips": "v5p:8x8x8", "batch": 512, "length": 4096}

LARGE: tuple[Case, ...] = (
    Case(**SIXTEENTH, layout="ep", mesh="fsdp=16,expert=8", move="moe=ring", why="as MaxText lays it out by default"),
    Case(
        **SIXTEENTH,
        layout="ep",
        mesh="fsdp=16,expert=8",
        move="moe=ring",
        expert_buffer=4.0,
        why="the same with half the buffer capacity",
    ),
    Case(**SIXTEENTH, layout="ep-as-cp", mesh="fsdp=16,expert=8", move="moe=ring", why="as MaxText's preset does"),
    Case(
        **SIXTEENTH,
        layout="ep-as-cp",
        mesh="fsdp=16,expert=8",
        move="moe=ring,attention=ring",
        why="the same, and no chip has the keys of an entire row",
    ),
    Case(
        **SIXTEENTH,
        layout="ep",
        mesh="fsdp=1,expert=128",
        expert_buffer=2.0,
        why="two experts a chip: the fewest bytes",
    ),
    Case(
        **SIXTEENTH,
        layout="ep",
        mesh="fsdp=1,expert=128",
        expert_buffer=1.5,
        why="the same with buffers for 1.5 times the even share",
    ),
    Case(
        **ON_512_CHIPS,
        layout="ep-as-cp",
        mesh="fsdp=64,expert=8",
        move="moe=ring",
        why="a ring of experts on 512 chips",
    ),
    Case(
        **ON_512_CHIPS,
        layout="ep-as-cp",
        mesh="fsdp=64,expert=8",
        move="moe=all-to-all",
        why="tokens sent on 512 chips",
    ),
    Case(
        model="llama3-405b",
        layout="fsdp-tp",
        mesh="data=8,fsdp=8,tensor=8",
        chips="h100:64x8",
        batch=64,
        length=8192,
        why="replicas, shards and tensor parallel on 512 GPUs",
    ),
)
"""The largest, which take minutes each."""
