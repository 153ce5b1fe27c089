"""Image folders and captions in, batches of cached latents and text embeddings out.

Data flow, one module a step::

    config      kohya's dataset TOML -> checked settings of every dataset and subset
    file_index  folders -> files with size, content hash and caption, remembered between runs
    sources     a subset -> its images with captions, and their masks and control images
    samples     settings + sources -> training samples and held-out samples
    buckets     image size -> size trained at;  captions: raw caption -> its variants;  images: file -> pixels
    masks       generated inpainting masks
    cache       pixels -> latents, captions -> embeddings: each encoded once, saved as safetensors
    batches     caches -> one sample -> one batch, and which samples make up which batch of an epoch
    dataset     all of it behind :func:`library.data.dataset.build_dataset`;  lint: what is wrong with a dataset
"""
