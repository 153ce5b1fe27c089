"""Formats that are known and not read: each is refused by name, with the file to use instead.

They are told by what their tensors are called, which differs for each:

    SVDQuant (Nunchaku)    ``qweight`` int8 with ``wscales``, ``smooth_factor``, ``proj_down``, ``proj_up``; modulations
                           ``qweight`` int32 with ``wscales``, ``wzeros``; older files ``lora_down``, ``smooth``
    GPTQ, AWQ              ``qweight`` int32 with ``qzeros``, ``scales``, GPTQ's also ``g_idx``
    compressed-tensors     ``weight_packed`` with ``weight_shape``, ``weight_scale``
    Quanto                 ``weight._data``, ``weight._scale``
    torchao                ``_weight_qdata`` (in names from its ``tensor_names`` in the header), ``_weight_scale``
    bitsandbytes' int8     ``weight`` int8 with ``SCB``, ``weight_format``
    SDNQ                   ``weight`` with ``scale``, ``zero_point``, ``svd_up``, ``svd_down``
    HQQ                    ``W_q`` with ``meta``
    ComfyUI's 4 bits       a ``comfy_quant`` whose format is ``convrot_w4a4``, ``asym_w4a8_int8`` or ``awq_w4a16``

and in folders of diffusers and transformers by ``quant_method`` in ``config.json``.
"""

from __future__ import annotations

import re

from library.files import read_json
from library.precision.files.base import StoredWeight
from library.precision.files.file_tensors import FileTensors

_OTHER_FILE = "use the bf16 model, or its fp8, int8, GGUF or bitsandbytes nf4 file"
_NUNCHAKU = "train on the bf16 file of the same model: Nunchaku puts a LoRA beside its weights, where it is not rounded"
_COMFY = "use the int8_convrot, nvfp4, GGUF or bf16 file of the same model"
# the last parts of a tensor's name -> what it belongs to, and the remedy; the first that is found is named
_BY_NAME: tuple[tuple[str, str, str], ...] = (
    (r"wscales|wzeros|wcscales", "Nunchaku's SVDQuant", _NUNCHAKU),
    (r"g_idx", "a GPTQ model", _OTHER_FILE),
    (r"qzeros", "an AWQ or GPTQ model", _OTHER_FILE),
    (r"weight_packed", "a compressed-tensors model", _OTHER_FILE),
    (r"_data|weight\._data\._data", "a Quanto model", _OTHER_FILE),
    (r"_weight_qdata", "a torchao model", _OTHER_FILE),
    (r"SCB", "bitsandbytes' LLM.int8", _OTHER_FILE),
    (r"svd_up|svd_down", "an SDNQ model", _OTHER_FILE),
    (r"W_q", "an HQQ model", _OTHER_FILE),
    (r"qweight", "a model of packed integers (AWQ, GPTQ or SVDQuant)", _OTHER_FILE),
)
_MARKS = [(re.compile(rf".*\.({leaf})"), title, remedy) for leaf, title, remedy in _BY_NAME]
_COMFY_FORMATS = ("convrot_w4a4", "asym_w4a8_int8", "awq_w4a16")
_METHODS = {  # of config.json; its other methods are read, or told by their tensors
    "gptq": "a GPTQ model",
    "awq": "an AWQ model",
    "compressed-tensors": "a compressed-tensors model",
    "quanto": "a Quanto model",
    "torchao": "a torchao model",
    "sdnq": "an SDNQ model",
    "hqq": "an HQQ model",
    "eetq": "an EETQ model",
    "aqlm": "an AQLM model",
    "svdquant": "Nunchaku's SVDQuant",
}


def find(file: FileTensors) -> dict[str, StoredWeight]:
    """Return no weight.

    Raises:
        UserError: ``file`` is of a format that is known and not read.
    """
    for layer, config in file.layer_configs.items():
        if config.get("format") in _COMFY_FORMATS:
            raise file.refuse(f"{layer}.comfy_quant", f"is ComfyUI's {config['format']}, which is not read", _COMFY)
    for pattern, title, remedy in _MARKS:
        for name in file.entries:
            if pattern.fullmatch(name):
                raise file.refuse(name, f"belongs to {title}, which is not read", remedy)
    if "tensor_names" in file.metadata:
        raise file.refuse("tensor_names", "in the header is that of a torchao model, which is not read", _OTHER_FILE)
    if (file.path / "config.json").is_file():
        said = read_json(file.path / "config.json")
        method = (said.get("quantization_config") or {}).get("quant_method") if isinstance(said, dict) else None
        if known := _METHODS.get(str(method).lower()):
            raise file.refuse("config.json", f"says {known}, which is not read", _OTHER_FILE)
    return {}
