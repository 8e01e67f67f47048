"""From a request body to requests for the engine: prompts become token ids, options become
sampling settings, defaults are filled in and bounds are checked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from llguidance import LLMatcher
from transformers import PreTrainedTokenizerBase

from moe_infinity.errors import CheckpointError
from moe_infinity.images.prompt import PromptImages
from moe_infinity.model import MoE
from moe_infinity.prefixes.lengths import has_growing_context, longest_context
from moe_infinity.server.chat import ChatBody
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.efforts import HINTS
from moe_infinity.server.generation import Generation
from moe_infinity.server.grammars import (
    GrammarCompiler,
    Structure,
    calls_in,
    message_in,
    part_of,
    require_begun,
    tight,
    tools_of,
)
from moe_infinity.server.image_reader import ImageReader
from moe_infinity.server.limits import LISTED, PROMPTS
from moe_infinity.server.messages import MessageFormat
from moe_infinity.server.protocol import (
    CompletionBody,
    EmbeddingsBody,
    GenerationBody,
    MixedPrompt,
    Prompts,
    each_of,
)
from moe_infinity.server.refusals import BadRequest, PromptTooLong, require_within
from moe_infinity.server.rendering import TemplateRaised
from moe_infinity.server.sampling import Constraint, Sampling
from moe_infinity.server.sequences import Request
from moe_infinity.server.templates import ChatTemplate
from moe_infinity.server.thoughts import ThoughtBudget
from moe_infinity.server.tokens import TextTokens

logger = logging.getLogger(__name__)
COMPLETION_TOKENS = 16  # when /v1/completions does not say, as in OpenAI's
# What is no client's to set.
TEMPLATE_ARGUMENTS = {
    "messages",
    *signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
}


# What another API calls a field of a chat request, for refusals.
FieldNames = Mapping[str, str]
SAME_NAMES: FieldNames = {}


class PromptReader:
    """Reads request bodies with the model's tokenizer and chat template. Safe to call from several
    threads.
    """

    def __init__(self, moe: MoE, config: ServeConfig, *, reads_whole: bool = False) -> None:
        """`reads_whole`: a prompt is one pass, however long."""
        self.tokenizer = moe.tokenizer
        self._images = ImageReader(moe, config.allow_media or ())  # may find the chat template
        self.format = MessageFormat(moe.tokenizer, moe.model)
        self._template = ChatTemplate(moe.tokenizer, self.format.call_form)
        context = context_of(moe, config.max_context)
        self.max_context = within_memory(moe, context, reads_whole)  # tokens of prompt and answer
        self._max_prompts = config.max_queue
        self._max_new_tokens = config.max_new_tokens
        self._generation = Generation(moe.model)
        self._text_config = moe.model.config.get_text_config()
        self._vocab_size = self._text_config.vocab_size
        self._grammars = GrammarCompiler(moe.tokenizer, self._vocab_size, self._generation.end_ids)
        self._tokens = TextTokens(moe.tokenizer, self.max_context)
        if self._template.is_there:
            # It takes a second, which the first conversation need not wait for.
            threading.Thread(target=self._template.try_out, daemon=True).start()

    @property
    def takes_images(self) -> bool:
        return self._images.takes_images

    def completion(self, body: CompletionBody) -> list[Request]:
        """A request per prompt and choice; the choices of a prompt are neighbours.

        Raises BadRequest.
        """
        grammar = self._text_grammar(body.structure)
        requests = []
        has_special = body.add_special_tokens is not False
        for ids in self._all_ids(body.prompt, "prompt", has_special=has_special):
            max_tokens = body.max_tokens
            if max_tokens is None:
                max_tokens = self._generation.max_new_tokens(len(ids)) or COMPLETION_TOKENS
            requests += self._requests(ids, body, max_tokens, "prompt", grammar)
        if body.echo and body.num_logprobs is not None:
            num_listed = sum(len(each.prompt_ids) for each in requests) * (1 + body.num_logprobs)
            require_within(LISTED, num_listed, "logprobs")
        if body.echo:  # as the model gets it, special tokens included
            requests = [replace(each, echo=True, has_special=True) for each in requests]
        return requests

    def embeddings(self, body: EmbeddingsBody) -> list[Request]:
        """A request per input. Raises BadRequest."""
        if body.dimensions not in (None, width := self._text_config.hidden_size):
            message = f"embeddings of this model have {width} dimensions"
            raise BadRequest(message, param="dimensions")
        everything = self._all_ids(body.input, "input", most=PROMPTS.most)
        for ids in everything:
            self._fitting(ids, 0, "input")
        return [
            Request(prompt_ids=ids, max_new_tokens=0, pooling=body.pooling) for ids in everything
        ]

    def chat(self, body: ChatBody, names: FieldNames = SAME_NAMES) -> list[Request]:
        """A request per choice. Raises BadRequest."""
        param = names.get("messages", "messages")
        ids, images = self._conversation(body, names)
        max_tokens = body.max_answer_tokens
        if max_tokens is None:
            most = self._max_new_tokens or self._generation.max_new_tokens(len(ids))
            max_tokens = most or self.max_context
        grammar = self._chat_grammar(body, ids, names)
        requests = self._requests(ids, body, max_tokens, param, grammar)
        if images is not None:
            images.num_readers = len(requests)
        is_known = self.format.is_known
        hidden_ids = self.format.hidden_ids
        return [
            replace(
                each,
                images=images,
                has_special=is_known,
                hidden_ids=hidden_ids,
                budget=self._budget(body, ids, has_grammar=grammar is not None),
            )
            for each in requests
        ]

    def _budget(self, body: ChatBody, ids: list[int], *, has_grammar: bool) -> ThoughtBudget | None:
        """Return the budget of one answer's thoughts; None for any number of tokens."""
        if body.thought_budget is None:
            return None
        message = body.reasoning_budget_message or ""
        return self.format.budget(
            ids, body.thought_budget, message=message, has_grammar=has_grammar
        )

    def text_ids(self, text: str, param: str, *, has_special: bool) -> list[int]:
        """The token ids of a text, with those that the tokenizer puts around a text. Raises
        PromptTooLong, which names `param`.
        """
        return self._tokens.ids(text, param, has_special=has_special)

    def conversation_ids(self, body: ChatBody, names: FieldNames = SAME_NAMES) -> list[int]:
        """The token ids of a conversation, up to where the model answers.

        Raises BadRequest for a model without a chat template, or messages that it does not take.
        """
        return self._conversation(body, names)[0]

    def _conversation(
        self, body: ChatBody, names: FieldNames
    ) -> tuple[list[int], PromptImages | None]:
        if not self._template.is_there:
            raise BadRequest("this model has no chat template: use /v1/completions", code="no_chat")
        variables = self._template_variables(body)
        param = names.get("messages", "messages")
        marks = self._images.marks(body, param)
        messages = [message.for_template(marks) for message in body.messages]
        self._tokens.require_possible(sum(len(each["content"]) for each in messages), param)
        try:
            prompt = self._template.text(
                messages,
                body.template_tools,
                variables,
                is_continued=body.is_continued,
                begins_answer=body.add_generation_prompt is not False,
                marks=marks,
            )
        except TemplateRaised as error:
            message = f"the chat template does not take these messages: {error}"
            raise BadRequest(message, param=param) from error
        if marks is not None:
            return self._images.prompt(prompt, marks, param)
        return self.text_ids(prompt, param, has_special=False), None

    def _template_variables(self, body: ChatBody) -> dict[str, Any]:
        """Hints are for templates that have such a variable. Raises BadRequest for another variable
        that was asked for by name and is not there.
        """
        has = self._template.has_variable
        asked = {
            name: value
            for name, value in (body.chat_template_kwargs or {}).items()
            if name not in HINTS or has(name)
        }
        for name in asked:
            if name in TEMPLATE_ARGUMENTS or not has(name):
                message = "the chat template has no such variable"
                raise BadRequest(message, param=f"chat_template_kwargs.{name}")
        return {name: hint for name, hint in body.template_hints.items() if has(name)} | asked

    def text_of(self, token_ids: list[int]) -> str:
        """The text of token ids. Raises BadRequest for an id outside of the vocabulary."""
        self._require_known(token_ids, "tokens")
        text: str = self.tokenizer.decode(token_ids)
        return text

    def _all_ids(
        self,
        prompts: Prompts,
        param: str,
        *,
        has_special: bool = True,
        most: int | None = None,  # None: as many as may wait
    ) -> list[list[int]]:
        if not prompts:
            raise BadRequest(f"there is no {param}", param=param)
        each = each_of(prompts)
        most = self._max_prompts if most is None else most
        if len(each) > most:
            message = f"{len(each)} sequences, at most {most} may wait"
            raise BadRequest(message, param=param)
        return [self._ids_of(prompt, param, has_special) for prompt in each]

    def _ids_of(self, prompt: str | MixedPrompt, param: str, has_special: bool) -> list[int]:
        """Texts between token ids get no special tokens, unless the first."""
        if isinstance(prompt, str):
            return self.text_ids(prompt, param, has_special=has_special)
        ids: list[int] = []
        for at, piece in enumerate(prompt):
            if isinstance(piece, str):
                ids += self.text_ids(piece, param, has_special=has_special and at == 0)
            else:
                self._require_known([piece], param)
                ids.append(piece)
        return ids

    def _require_known(self, token_ids: list[int], param: str) -> None:
        if token_ids and max(token_ids) >= self._vocab_size:
            message = f"token id {max(token_ids)} of a vocabulary of {self._vocab_size}"
            raise BadRequest(message, param=param)

    def _text_grammar(self, structure: Structure | None) -> LLMatcher | None:
        """Return the grammar of an answer that is only text; None for any text."""
        if structure is None:
            return None
        lark = self._grammars.lark(structure.param)
        start = lark.add(part_of(structure, structure.param))
        return self._grammars.compiled(lark, start, structure.param)

    def _chat_grammar(self, body: ChatBody, ids: list[int], names: FieldNames) -> LLMatcher | None:
        """Return the grammar of a message: its text, or calls of tools, behind its reasoning.

        None for any message.
        """
        structure = body.structure
        if structure is None and not body.must_call:
            return None
        messages_param = names.get("messages", "messages")
        param = "tool_choice"
        if structure is not None:
            param = names.get(structure.param, structure.param)
        lark = self._grammars.lark(param)
        form = self.format.answer_form if self.format.is_known else None
        options = []
        begun = str(body.messages[-1].for_template()["content"]) if body.is_continued else ""
        if structure is not None:
            begin = "" if form is None or begun else lark.literal(form.answer)
            options.append(f"{begin} {lark.add(part_of(structure, param))}")
        parameters = names.get("function.parameters", "function.parameters")
        tools = tools_of(body.template_tools or [], parameters)
        if tools and form is not None and self.format.reads_calls(ids, tools[0].name):
            tools = [tool for tool in tools if body.called_name in (None, tool.name)]
            if not tools:
                raise BadRequest(f"no tool is called {body.called_name!r}", param=param)
            options.append(calls_in(lark, form.calls, tools, body.max_calls))
        elif body.must_call:
            message = "it is not known how this model writes calls, so it cannot be made to"
            raise BadRequest(message, param=param)
        is_thinking = self.format.has_begun_reasoning(ids)
        if structure is None or not begun:
            start = message_in(lark, form, options, is_thinking=is_thinking)
            return self._grammars.compiled(lark, start, param)
        if structure.kind == "json":
            begun = tight(begun)
        grammar = self._grammars.compiled(lark, " | ".join(options), param)
        begun_ids = self.text_ids(begun, messages_param, has_special=False)
        require_begun(grammar, begun, begun_ids, messages_param)
        return grammar

    def _requests(
        self,
        ids: list[int],
        body: GenerationBody,
        max_tokens: int,
        param: str,
        grammar: LLMatcher | None,
    ) -> list[Request]:
        max_tokens = self._fitting(ids, max_tokens, param)
        return [
            Request(
                prompt_ids=ids,
                max_new_tokens=max_tokens,
                sampling=self._sampling(body, choice),
                stop=body.stops,
                constraint=None if grammar is None else Constraint(grammar.deep_copy()),
            )
            for choice in range(body.num_choices)
        ]

    def _fitting(self, ids: list[int], max_tokens: int, param: str) -> int:
        """Return how many tokens of answer there is room for, at most `max_tokens`.

        Raises BadRequest for a prompt without tokens, or with too many.
        """
        if not ids:
            raise BadRequest("this has no tokens", param=param)
        room = self.max_context - len(ids)
        if room < min(max_tokens, 1):
            raise PromptTooLong(len(ids), self.max_context, param=param)
        if room < max_tokens != self.max_context:
            logger.info("an answer may have %d tokens, not the %d asked for", room, max_tokens)
        return min(max_tokens, room)

    def _sampling(self, body: GenerationBody, choice: int) -> Sampling:
        """The settings of a request; what it leaves out is as the checkpoint says."""
        bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
        self._require_known(list(bias), "logit_bias")
        self._require_known(body.stop_token_ids or [], "stop_token_ids")
        asked = Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            typical_p=body.typical_p,
            epsilon_cutoff=body.epsilon_cutoff,
            eta_cutoff=body.eta_cutoff,
            no_repeat_ngram_size=body.no_repeat_ngram_size,
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            seed=None if body.seed is None else (body.seed + choice) % 2**64,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            logit_bias=bias,
            num_logprobs=body.num_logprobs,
        )
        return self._generation.filled(asked)


def context_of(moe: MoE, wanted: int | None) -> int:
    """The most tokens of prompt and answer: `wanted`, but not more than the model was made for.

    Raises CheckpointError if neither is known.
    """
    config = moe.model.config.get_text_config(decoder=True)
    longest = longest_context(config)
    if wanted is None and longest is None:
        raise CheckpointError("the model does not say how long a context it takes: --max-context")
    if wanted is None or longest is None:
        wanted = wanted or longest or 0
    elif wanted > longest and not has_growing_context(config):
        logger.warning(
            "--max-context %d is lowered to %d, the most that the model's config.json allows",
            wanted,
            longest,
        )
        wanted = longest
    return wanted


def within_memory(moe: MoE, context: int, reads_whole: bool) -> int:
    """The most tokens of prompt and answer, at most `context`, that memory has room for."""
    most = moe.engine.room.most_tokens(context, is_whole=reads_whole)
    if most < context:
        logger.warning(
            "prompt and answer may have %d tokens together: memory has no room for the keys and "
            "values of %d\nhint: raise --memory", most, context,
        )  # fmt: skip
    return most
