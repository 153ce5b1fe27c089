"""What `dev/make_tiny_models.py` is made of: painted pictures in, a small trained FLUX pipeline out.

Read in the order in which the data goes:
    painting, outdoors, scenes      shapes on a canvas; a caption and its picture
    mascot, textures                the demo's subject; the pictures that only the VAE sees
    vocabulary, architecture        tokenizers; the pipeline's parts, untrained
    vae_training                    pictures → autoencoder
    latent_pool                     scenes → latents and token ids
    text_to_image, dit_training     transformer and text encoders as one module; flow matching, distillation
    sample_sheet, pipeline_folder   what a person looks at; what FluxPipeline loads
    run_state                       averaged weights, resumable states, progress
"""
