# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights that see, with their processors; made without a model hub."""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata

from tests.families.random_models import SIZES, VOCABULARY, randomise

CHAT = (
    "{% for message in messages %}{% if message.content is string %} {{ message.content }}"
    "{% else %}{% for part in message.content %} {% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|image_pad|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)

PILLOW_ALONE = Path(__file__).parents[1] / "pillow_alone"
"""Goes on ``PYTHONPATH``."""

IMAGE, VIDEO, START, END = 511, 510, 509, 508
"""Tokens that stand for something else than words."""
WORDS = 500


_TEXT = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 3} | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN_SIGHT = {"depth": 2, "num_heads": 1, "hidden_size": 128, "intermediate_size": 64} | {
    "out_hidden_size": 128, "patch_size": 14,
}  # fmt: skip
"""Its keys have more numbers that are turned than those of the text."""
_QWEN_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END,
}  # fmt: skip
_MROPE = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [4, 6, 6]}

MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 140, "patch_size": 14}
        | {"hidden_size": 64, "intermediate_size": 64, "projection_dim": 64}
        | {"num_hidden_layers": 2, "num_attention_heads": 2},
        "image_token_index": IMAGE,
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {"depth": 2, "num_heads": 2, "embed_dim": 64, "hidden_size": 128},
        **_QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_SIGHT, "window_size": 56, "fullatt_block_indexes": [1]},
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision_config": {**_QWEN_SIGHT, "num_position_embeddings": 256}
        | {"deepstack_visual_indexes": [0, 1]},
        **_QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": _TEXT
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 6, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {
            "rope_parameters": _MROPE
            | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
            | {"partial_rotary_factor": 0.25}
        },
        "vision_config": {**_QWEN_SIGHT, "num_position_embeddings": 256},
        **_QWEN_TOKENS,
    },
}


@dataclass
class Pictured:
    """A prompt with pictures and videos: each is one token, :data:`IMAGE` or :data:`VIDEO`, until a
    processor makes it many.

    ``videos``: frames, [T, H, W, 3], uint8.
    """

    tokens: list[int]
    pictures: list[Image.Image]
    videos: list[NDArray[np.uint8]] = field(default_factory=list)

    @property
    def prompt(self) -> dict[str, Any]:
        """As vLLM takes it."""
        seen: dict[str, Any] = {"image": self.pictures} if self.pictures else {}
        if self.videos:
            seen["video"] = [
                (frames, {**_metadata(len(frames)), "do_sample_frames": False})
                for frames in self.videos
            ]
        return {"prompt_token_ids": self.tokens, "multi_modal_data": seen}


def _metadata(frames: int) -> dict[str, Any]:
    """Of a video of which two frames were taken per second, and all are there."""
    return {
        "fps": 2.0, "duration": frames / 2, "total_num_frames": frames,
        "frames_indices": list(range(frames)), "video_backend": "opencv",
    }  # fmt: skip


def picture(seed: int, width: int = 140, height: int = 140) -> Image.Image:
    """Of random colours."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def film(seed: int, frames: int, width: int = 84, height: int = 84) -> NDArray[np.uint8]:
    """Of random colours, [frames, height, width, 3]."""
    return np.stack([np.asarray(picture(seed * 100 + at, width, height)) for at in range(frames)])


def pictured(length: int, *seen: tuple[int, Image.Image | NDArray[np.uint8]]) -> Pictured:
    """``length`` words, the same ones for the same length; pictures and videos, each behind so many words."""
    generator = torch.Generator().manual_seed(length)
    words = torch.randint(3, WORDS, (length,), generator=generator).tolist()
    prompt, done = Pictured([], []), 0
    for at, one in seen:
        token, among = IMAGE, prompt.pictures
        if isinstance(one, np.ndarray):
            token, among = VIDEO, prompt.videos
        prompt.tokens += [*words[done:at], START, token, END]
        among.append(one)
        done = at
    prompt.tokens += words[done:]
    return prompt


def expanded(directory: str, prompt: Pictured) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The tokens of a prompt as a model computes them, and the media as transformers' model takes them."""
    from transformers import AutoConfig, AutoImageProcessor

    seen: dict[str, torch.Tensor] = {}
    become: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    if prompt.pictures:
        seen |= AutoImageProcessor.from_pretrained(directory)(prompt.pictures, return_tensors="pt")
        grids = seen.get("image_grid_thw")
        # Qwen merges patches two by two in each direction.
        counts = [100] * len(prompt.pictures) if grids is None else (grids.prod(1) // 4).tolist()
        become[IMAGE] = [[IMAGE] * count for count in counts]
    if prompt.videos:
        kind = AutoConfig.from_pretrained(directory).model_type
        told = Videos()(prompt.videos)
        seen |= {name: told[name] for name in ("pixel_values_videos", "video_grid_thw")}
        become[VIDEO] = [_frames(kind, *grid) for grid in seen["video_grid_thw"].tolist()]
        # Two frames, at two per second.
        seen |= {"second_per_grid_ts": torch.ones(1)} if kind == "qwen2_5_vl" else {}
    tokens = [become[one].pop(0) if one in become else [one] for one in prompt.tokens]
    return [one for some in tokens for one in some], seen


def _frames(kind: str, frames: int, rows: int, columns: int) -> list[int]:
    """The tokens of a video, of pairs of frames with so many patches."""
    one = [VIDEO] * (rows * columns // 4)
    # Qwen3-VL says in words when a pair is; no such word is known.
    return ([0, 0, START, *one, END] if kind == "qwen3_vl" else one) * frames


def save_image_model(kind: str, directory: str, head_size: int = 32) -> None:
    """The model, and its processor and tokenizer: words are ``t3`` to ``t499``."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    sizes = MODELS[kind]
    text = {**SIZES, **sizes["text_config"], "head_dim": head_size}
    sight = sizes["vision_config"]
    if head_size != _TEXT["head_dim"]:
        hidden, rope = head_size * text["num_attention_heads"], text["rope_parameters"]
        section = [part * head_size // _TEXT["head_dim"] for part in rope["mrope_section"]]
        text |= {"hidden_size": hidden, "rope_parameters": rope | {"mrope_section": section}}
        sight = sight | {"out_hidden_size": hidden}
    given = {**sizes, "text_config": text, "vision_config": sight, "tie_word_embeddings": False}
    config = AutoConfig.for_model(kind, **given)
    model = AutoModelForMultimodalLM.from_config(config)
    # The text of Qwen3.5 has the layers of Qwen3-Next.
    randomise(model, "qwen3_next" if kind == "qwen3_5" else kind)
    model.save_pretrained(directory)
    if kind == "llava":
        _name_as_before(Path(directory) / "model.safetensors")
    with processors():
        _processor(kind).save_pretrained(directory)


def _name_as_before(weights: Path) -> None:
    """As transformers named CLIP's weights, and vLLM does: the newest one reads both and writes others."""
    named = load_file(weights)
    tower = "vision_tower."
    save_file(
        {name.replace(tower, f"{tower}vision_model."): one for name, one in named.items()},
        weights, {"format": "pt"},
    )  # fmt: skip


def _processor(kind: str) -> Any:
    import transformers

    tokenizer = _tokenizer()
    if kind == "llava":
        return transformers.LlavaProcessor(
            transformers.CLIPImageProcessorPil(size={"shortest_edge": 140}, crop_size=140),
            tokenizer, patch_size=14, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )  # fmt: skip
    cls = {
        "qwen2_vl": transformers.Qwen2VLProcessor,
        "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
        "qwen3_vl": transformers.Qwen3VLProcessor,
        "qwen3_5": transformers.Qwen3VLProcessor,
    }[kind]
    images = transformers.Qwen2VLImageProcessorPil(patch_size=14)
    return cls(images, tokenizer, Videos())


@contextmanager
def processors() -> Iterator[None]:
    """Our processor of videos; and processors that need Pillow alone, where there is no torchvision.

    Within the block, also for processes that start in it.
    """
    import transformers
    from transformers.utils import is_torchvision_available

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoVideoProcessor, "from_pretrained", lambda *_, **__: Videos())
        if not is_torchvision_available():
            patch.setenv("PYTHONPATH", str(PILLOW_ALONE), prepend=os.pathsep)
            # What is put there goes with the block.
            patch.setitem(sys.modules, "torchvision.transforms.v2", None)
            runpy.run_path(str(PILLOW_ALONE / "sitecustomize.py"))
            patch.setattr(transformers, "VideoProcessorMixin", VideoProcessorMixin, raising=False)
        yield


class Videos(VideoProcessorMixin):
    """Cuts frames into patches, as Qwen's does. Takes all frames, of multiples of 28 pixels, as they are."""

    size: ClassVar = {"shortest_edge": 4096, "longest_edge": 65536}
    patch_size, temporal_patch_size, merge_size = 14, 2, 2
    fps, min_frames, max_frames = 2, 4, 8

    def __call__(
        self, videos: list[Any], video_metadata: list[VideoMetadata] | None = None, *,
        do_normalize: bool = True, **_: object,
    ) -> BatchFeature:  # fmt: skip
        """videos: [T, H, W, 3] each, of 0 to 255, or such in lists; T is even. vLLM normalises by itself."""
        patches, grids = [], []
        videos, video_metadata = _flat(videos), _flat(video_metadata or [])
        for video in videos:
            frames = torch.as_tensor(np.array(video), dtype=torch.float32)
            if do_normalize:
                frames = (frames / 255 - torch.tensor(OPENAI_CLIP_MEAN)) / torch.tensor(
                    OPENAI_CLIP_STD
                )
            grid = [size // patch for size, patch in zip(frames.shape, (2, 14, 14), strict=False)]
            # Patches that are merged lie together.
            cut = frames.view(grid[0], 2, grid[1] // 2, 2, 14, grid[2] // 2, 2, 14, 3)
            patches.append(cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * 2 * 14 * 14))
            grids.append(grid)
        about = video_metadata or [VideoMetadata(**_metadata(len(video))) for video in videos]
        return BatchFeature({
            "pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids),
            "video_metadata": about,
        })  # fmt: skip


def _flat(nested: list[Any]) -> list[Any]:
    return [one for some in nested for one in (some if isinstance(some, list) else [some])]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
    named |= {START: "<|vision_start|>", END: "<|vision_end|>", 0: "<unk>", 1: "<s>", 2: "</s>"}
    words = {named.get(at, f"t{at}"): at for at in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [named[at] for at in (IMAGE, VIDEO, START, END)]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens={"image_token": named[IMAGE], "video_token": named[VIDEO]},
        additional_special_tokens=special, chat_template=CHAT,
    )  # fmt: skip
