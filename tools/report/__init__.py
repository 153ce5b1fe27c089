"""The parts of ``tools/precision_report.py``, in the order in which data goes through them.

deployments   the reference and the deployed model, and every single cause between them
runs          both on the same pictures, noise, noise levels and masks
layers        weights, activations, output errors and the LoRA's survival, layer by layer
differences   error by noise level, by region and along the seam
causes        one cause on at a time, and what the figures name as the cause
figures       pictures of it all
page          one self-contained HTML file, and the JSON
"""
