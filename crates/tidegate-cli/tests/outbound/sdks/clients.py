"""Unmodified SDKs, pointed at a gateway whose URL is the argument. Prints a line for each call that ended as it should."""

import sys

import anthropic
import github
import openai
import tmdbsimple

GATEWAY = sys.argv[1]
HELLO = [{"role": "user", "content": "Hello"}]


def check(name, found, expected):
    if found != expected:
        sys.exit(f"{name}: {found!r} instead of {expected!r}")
    print(f"ok {name}", flush=True)


def check_openai():
    client = openai.OpenAI(base_url=f"{GATEWAY}/openai", api_key="the gateway has the key")

    def say(model, retries=2):
        completions = client.with_options(max_retries=retries).chat.completions
        return completions.create(model=model, messages=HELLO).choices[0].message.content

    # The gateway waits for the limit. It doesn't repeat a failed POST, but the SDK does.
    check("openai throttled", say("python-throttled", retries=0), "Hello you")
    for model in ["m", "python-failing"]:
        check(f"openai {model}", say(model), "Hello you")
    stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)
    check("openai stream", "".join(chunk.choices[0].delta.content for chunk in stream), "Hello you")
    check("openai pages", [file.id for file in client.files.list()], [f"file-{n}" for n in range(1, 7)])
    try:
        say("broken")
    except openai.InternalServerError as error:
        check("openai error", error.message.count("an internal error"), 1)
    spent = openai.OpenAI(base_url=f"{GATEWAY}/openai-spent", api_key="the gateway has the key")
    spent.files.list()
    try:
        spent.files.list()
    except openai.RateLimitError as error:
        seen = (error.code, error.type, error.message.count("the quota `openai-spent` is spent"))
        check("openai refusal", seen, ("rate_limit_exceeded", "rate_limit_error", 1))


def check_anthropic():
    client = anthropic.Anthropic(base_url=f"{GATEWAY}/anthropic", api_key="the gateway has the key")

    def say(model, retries=2):
        messages = client.with_options(max_retries=retries).messages
        return messages.create(model=model, max_tokens=9, messages=HELLO).content[0].text

    check("anthropic throttled", say("python-throttled", retries=0), "Hello you")
    for model in ["m", "python-failing"]:
        check(f"anthropic {model}", say(model), "Hello you")
    with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
        check("anthropic stream", "".join(stream.text_stream), "Hello you")
    check("anthropic pages", [model.id for model in client.models.list()], [f"m{n}" for n in range(1, 7)])
    try:
        say("broken")
    except anthropic.InternalServerError as error:
        check("anthropic error", error.message.count("an internal error"), 1)
    spent = anthropic.Anthropic(base_url=f"{GATEWAY}/anthropic-spent", api_key="the gateway has the key")
    spent.models.list()
    try:
        spent.models.list()
    except anthropic.RateLimitError as error:
        check("anthropic refusal", error.message.count("the quota `anthropic-spent` is spent"), 1)


def check_github():
    auth = github.Auth.Token("the gateway has it")
    options = {"base_url": f"{GATEWAY}/github", "auth": auth, "retry": None, "per_page": 2}
    client = github.Github(**options)
    check("github user", client.get_user().login, "o")
    repository = client.get_repo("o/python-throttled")
    check("github throttled", repository.full_name, "o/r")
    check("github failing", client.get_repo("o/python-failing").full_name, "o/r")
    issues = github.Github(**options, lazy=True).get_repo("o/r").get_issues()
    check("github pages", [issue.number for issue in issues], [1, 2, 3, 4, 5, 6])
    try:
        repository.get_issues()[0]
    except AssertionError as error:
        check("github url in a body", str(error), "api.github.com")


def check_tmdb():
    tmdbsimple.API_KEY = "the gateway has the key"
    tmdbsimple.USE_BEARER_AUTH = True

    def movie(number):
        found = tmdbsimple.Movies(number)
        found.base_uri = f"{GATEWAY}/tmdb"
        return found

    check("tmdb movie", movie(603).info()["title"], "The Matrix")
    check("tmdb pages", [movie(603).reviews(page=page)["page"] for page in (1, 2)], [1, 2])
    for trouble in ["python-throttled", "python-failing"]:
        check(f"tmdb {trouble}", movie(trouble).info()["title"], "The Matrix")


check_openai()
check_anthropic()
check_github()
check_tmdb()
