# Puna in a container: docker build -t puna .   then see docs/install.md
# The compiler and npm stay in the first stage; the second has Python, the wheel and what it needs.

FROM python:3.12-slim AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ npm \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY src src
COPY share share
RUN pip wheel --no-cache-dir --constraint constraints.txt --wheel-dir /wheels .

FROM python:3.12-slim
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --home-dir /home/puna puna \
 && install --directory --owner=puna --group=puna /models
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels puna && rm -rf /wheels
USER puna
WORKDIR /home/puna
ENV OLLAMA_HOST=0.0.0.0:11434 \
    OLLAMA_MODELS=/models
VOLUME /models
EXPOSE 11434
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:11434/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["puna"]
CMD ["serve"]
