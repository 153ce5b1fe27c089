"""What `dev/make_tiny_models.py` is made of: painted images in, a small trained FLUX pipeline out.

Read in the order in which the data goes:
    painting, scenes    shapes on a canvas; a caption and its image, and the demo's subject
    latent_pool         scenes → latents and token ids
    transformer         the pipeline's parts, as one module; what FluxPipeline loads
    training            the one loop; flow matching, distillation
    fill                regions to fill; the fill model's data and training
"""
