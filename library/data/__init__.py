"""Image folders and captions in, batches of cached latents and text embeddings out.

The way of the data, one module a step::

    config      kohya's dataset TOML -> checked settings of every dataset and subset
    file_index  folders -> files with size, content hash and caption, remembered between runs
    samples     settings + files -> training samples and held-out samples
    buckets     image size -> size trained at;  captions: raw caption -> its variants;  images: file -> pixels
    companions  an image -> its masks and control pictures;  inpaint_masks: masks drawn from nothing
    cache       pixels -> latents, each encoded once and kept as safetensors;  condition_cache: the same of regions to
                fill and control pictures;  text_cache: captions -> embeddings
    batches     caches -> one sample -> one batch;  order: which samples make up which batch of an epoch
    dataset     all of it behind :func:`library.data.dataset.build_dataset`
"""
