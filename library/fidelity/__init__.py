"""bf16 and fp8 alike: what fp8 does to a model with a LoRA, measured on the user's own images, and what undoes it.

calibration   the images, noise and noise levels that everything here runs the model on
quantize      bf16 checkpoint -> fp8 file, which layers stay in bf16 and how the others round decided by activations
merge         LoRAs rounded into fp8 weights so that they still act, and a LoRA of what rounding lost
refit         a LoRA refitted to the fp8 file it is used with

The report (``tools/precision_report.py``), in the order in which data goes through it:

deployments   the reference, the deployed model, every single cause between them; both run on the same inputs
layers        weights, activations, output errors and the LoRA's update retention, layer by layer
causes        error by noise level, by region and along the mask boundary; one cause on at a time, and what it names
report        from a request to all that is measured
fixes         what removes the difference, from the cheapest on
page          plots, one self-contained HTML file, and the JSON
"""

SERVERS = ("comfyui", "comfyui-bypass", "comfyui-legacy", "diffusers", "gguf")
MERGES = ("nearest", "stochastic", "stochastic_fp16", "unrounded")  # how a LoRA is added to weights
FIXES = (
    "settings",
    "bypass",
    "strength",
    "refit",
    "correction",
    "rebuild",
    "exclude",
    "teacher",
    "together",
)
