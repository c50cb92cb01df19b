# The serving host: the runtime without torch, for any user and without a network.
#
#   docker build -t transferry .
#   docker build -t transferry --build-arg ONNXRUNTIME=onnxruntime --build-arg EXTRAS=tokenizers,chat .
#   docker run --rm --user "$(id -u)" -v "$PWD:/work" transferry run bundles/ende lines.en -o lines.de.jsonl
#
# ONNXRUNTIME=onnxruntime leaves CUDA's provider out, 284 of 464 MB; EXTRAS are those that
# `transferry inspect` names.
FROM python:3.12-slim AS wheels
ARG ONNXRUNTIME=onnxruntime-gpu EXTRAS=
COPY . /checkout
RUN pip wheel --no-cache-dir --wheel-dir /wheels "/checkout${EXTRAS:+[$EXTRAS]}" \
    && if [ "$ONNXRUNTIME" != onnxruntime-gpu ]; then \
      rm /wheels/onnxruntime_gpu-*.whl \
      && pip wheel --no-cache-dir --no-deps --wheel-dir /wheels "$ONNXRUNTIME>=1.31,<1.32"; fi

FROM python:3.12-slim
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --no-deps /wheels/*.whl
WORKDIR /work
USER 65534
ENTRYPOINT ["transferry"]
