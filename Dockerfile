# halopose with the shipped heads.
#   docker build -t halopose .                              CPU
#   docker build -t halopose --build-arg TORCH=cuda .       CUDA, run with --gpus all
#   docker run --rm -v "$PWD:/work" halopose predict photo.jpg
FROM python:3.12-slim

ARG TORCH=cpu
WORKDIR /opt/halopose
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
COPY models models
# The default build of torch on Linux carries CUDA. The CPU build is a tenth of its size.
RUN if [ "$TORCH" = cpu ]; then \
      pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
        ./models ".[ultralytics,onnx]"; \
    else \
      pip install --no-cache-dir ./models ".[ultralytics,onnx]"; \
    fi \
 && pip uninstall --yes opencv-python 2>/dev/null; pip install --no-cache-dir --force-reinstall --no-deps "opencv-python-headless>=4.11" \
 && useradd --create-home halopose
USER halopose
WORKDIR /work
ENTRYPOINT ["halopose"]
CMD ["--help"]
