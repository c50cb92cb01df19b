# The serving host: the runtime without torch, for any user and without a network.
#
#   docker build -t transferry .
#   docker run --rm --user "$(id -u)" -v "$PWD:/work" transferry run bundles/ende lines.en -o lines.de.jsonl
FROM python:3.12-slim AS wheels
COPY . /checkout
RUN pip wheel --no-cache-dir --wheel-dir /wheels /checkout

FROM python:3.12-slim
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels transferry
WORKDIR /work
USER 65534
ENTRYPOINT ["transferry"]
