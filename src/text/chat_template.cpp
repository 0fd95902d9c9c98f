#include "text/chat_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "text/json_place.h"

namespace kdtree {

namespace {

constexpr std::string_view kThink = "<think>";
constexpr std::string_view kThinkEnd = "</think>";

// Collects segments; joins neighbours that are text.
class Segments {
 public:
  Segments& token(std::string_view name) {
    segments_.push_back({std::string(name), true});
    return *this;
  }
  Segments& text(std::string_view text) {
    if (text.empty()) {
      return *this;
    }
    if (segments_.empty() || segments_.back().special) {
      segments_.push_back({});
    }
    segments_.back().text += text;
    return *this;
  }
  std::vector<ChatSegment> take() { return std::move(segments_); }

 private:
  std::vector<ChatSegment> segments_;
};

// Kimi.

void add_kimi_message(const ChatMessage& message, bool with_think, bool with_reasoning,
                      Segments& segments) {
  segments.token(message.role == ChatRole::kUser        ? "<|im_user|>"
                 : message.role == ChatRole::kAssistant ? "<|im_assistant|>"
                                                        : "<|im_system|>");
  segments.text(message.name.empty() ? message.role_name : message.name).token("<|im_middle|>");
  if (message.role == ChatRole::kAssistant && with_think) {
    segments.token(kThink).text(with_reasoning ? message.reasoning_content : "").token(kThinkEnd);
  }
  if (message.role == ChatRole::kTool) {
    segments.text("## Return of ").text(message.tool_call_id).text("\n");
  }
  segments.text(message.content.value_or(""));
  if (!message.tool_calls.empty()) {
    segments.token("<|tool_calls_section_begin|>");
    for (const ChatToolCall& call : message.tool_calls) {
      segments.token("<|tool_call_begin|>").text(call.id);
      segments.token("<|tool_call_argument_begin|>").text(call.arguments);
      segments.token("<|tool_call_end|>");
    }
    segments.token("<|tool_calls_section_end|>");
  }
  segments.token("<|im_end|>");
}

std::vector<ChatSegment> render_kimi(bool with_think, const Chat& chat, bool thinking) {
  const std::vector<ChatMessage>& messages = chat.messages;
  Segments segments;
  if (!chat.tools.empty()) {
    segments.token("<|im_system|>").text("tool_declare").token("<|im_middle|>");
    segments.text(chat.tools).token("<|im_end|>");
  }
  if (!with_think && messages.front().role != ChatRole::kSystem) {
    segments.token("<|im_system|>").text("system").token("<|im_middle|>");
    segments.text("You are Kimi, an AI assistant created by Moonshot AI.").token("<|im_end|>");
  }
  // Reasoning is kept behind the last answer that calls no tool.
  const auto last = std::find_if(messages.rbegin(), messages.rend(), [](const auto& message) {
    return message.role == ChatRole::kAssistant && message.tool_calls.empty();
  });
  const auto history = static_cast<std::size_t>(messages.rend() - last);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    add_kimi_message(messages[i], with_think, i >= history, segments);
  }
  segments.token("<|im_assistant|>").text("assistant").token("<|im_middle|>");
  if (with_think) {
    segments.token(kThink);
    if (!thinking) {
      segments.token(kThinkEnd);
    }
  }
  return segments.take();
}

// DeepSeek.

constexpr std::string_view kBegin = "<｜begin▁of▁sentence｜>";
constexpr std::string_view kEnd = "<｜end▁of▁sentence｜>";
constexpr std::string_view kUserHeader = "<｜User｜>";
constexpr std::string_view kAssistantHeader = "<｜Assistant｜>";

// The published template's state while it walks the messages; it never resets the first two.
class DeepseekChat {
 public:
  void add(const ChatMessage& message) {
    switch (message.role) {
      case ChatRole::kSystem:
        break;  // all stand at the front
      case ChatRole::kUser:
        in_tools_ = false;
        segments_.token(kUserHeader).text(*message.content);
        break;
      case ChatRole::kAssistant:
        message.content ? add_answer(*message.content) : add_calls(message.tool_calls);
        break;
      case ChatRole::kTool:
        add_output(*message.content);
        break;
    }
  }

  std::vector<ChatSegment> finish(bool reasons) {
    if (in_tools_) {
      segments_.token("<｜tool▁outputs▁end｜>");
    } else {
      segments_.token(kAssistantHeader);
      if (reasons) {
        segments_.token(kThink).text("\n");
      }
    }
    return segments_.take();
  }

  Segments& segments() { return segments_; }

 private:
  void add_answer(const std::string& content) {
    segments_.token(in_tools_ ? "<｜tool▁outputs▁end｜>" : kAssistantHeader);
    segments_.text(content).token(kEnd);
    in_tools_ = false;
  }

  void add_calls(const std::vector<ChatToolCall>& calls) {
    in_tools_ = false;
    for (const ChatToolCall& call : calls) {
      const bool first = !std::exchange(called_, true);
      if (first) {
        segments_.token(kAssistantHeader).token("<｜tool▁calls▁begin｜>");
      } else {
        segments_.text("\n");
      }
      segments_.token("<｜tool▁call▁begin｜>").text(call.type).token("<｜tool▁sep｜>");
      segments_.text(call.name).text("\n```json\n").text(call.arguments).text("\n```");
      segments_.token("<｜tool▁call▁end｜>");
      if (!first) {
        segments_.token("<｜tool▁calls▁end｜>").token(kEnd);
      }
    }
  }

  void add_output(const std::string& content) {
    in_tools_ = true;
    if (!std::exchange(had_output_, true)) {
      segments_.token("<｜tool▁outputs▁begin｜>");
    } else {
      segments_.text("\n");
    }
    segments_.token("<｜tool▁output▁begin｜>").text(content).token("<｜tool▁output▁end｜>");
  }

  bool called_ = false;
  bool had_output_ = false;
  bool in_tools_ = false;
  Segments segments_;
};

std::vector<ChatSegment> render_deepseek(bool reasons, const Chat& chat) {
  require_input(chat.tools.empty(),
                "{}: key 'tools' declares tools, expected none: DeepSeek's chat template has no "
                "place for them",
                chat.origin);
  DeepseekChat state;
  state.segments().token(kBegin);
  bool first = true;
  for (const ChatMessage& message : chat.messages) {
    if (message.role == ChatRole::kSystem) {
      state.segments().text(std::exchange(first, false) ? "" : "\n\n").text(*message.content);
    }
  }
  for (const ChatMessage& message : chat.messages) {
    state.add(message);
  }
  return state.finish(reasons);
}

// Messages.

std::string text_or_empty(const JsonPlace& place, std::string_view key) {
  const auto found = place.find(key);
  return found ? found->text() : "";
}

ChatToolCall parse_call(const JsonPlace& place) {
  const JsonPlace function = place.at("function", "an object with name and arguments");
  const std::string type = text_or_empty(place, "type");
  return {.id = text_or_empty(place, "id"),
          .type = type.empty() ? "function" : type,
          .name = function.at("name", "a string").text(),
          .arguments = function.at("arguments", "a string of JSON").text()};
}

ChatMessage parse_message(const JsonPlace& place) {
  ChatMessage message;
  message.role =
      static_cast<ChatRole>(place.choice("role", {"system", "user", "assistant", "tool"}));
  message.role_name = place.at("role", "a role").text();
  message.name = text_or_empty(place, "name");
  message.reasoning_content = text_or_empty(place, "reasoning_content");
  message.tool_call_id = text_or_empty(place, "tool_call_id");
  if (const auto calls = place.find("tool_calls"); calls && message.role == ChatRole::kAssistant) {
    for (const JsonPlace& call : calls->elements()) {
      message.tool_calls.push_back(parse_call(call));
    }
  }
  if (const auto content = place.find("content")) {
    message.content = content->text();
  } else if (message.tool_calls.empty()) {
    place.at("content", "a string");
  }
  return message;
}

}  // namespace

std::optional<ChatTemplate> find_chat_template(std::string_view name) {
  constexpr std::pair<std::string_view, ChatTemplate> kNames[] = {
      {"kimi-k2.6", ChatTemplate::kKimiK26},
      {"kimi-k2", ChatTemplate::kKimiK2},
      {"deepseek-v3", ChatTemplate::kDeepseekV3},
      {"deepseek-r1", ChatTemplate::kDeepseekR1}};
  for (const auto& [known, value] : kNames) {
    if (known == name) {
      return value;
    }
  }
  return std::nullopt;
}

Chat parse_chat(const nlohmann::ordered_json& json, const std::string& origin) {
  const nlohmann::json sorted = json;
  const JsonPlace top(sorted, origin);
  const JsonPlace list = sorted.is_array() ? top : top.at("messages", "a list of messages");
  Chat chat{.messages = {}, .tools = "", .origin = origin};
  for (const JsonPlace& place : list.elements()) {
    chat.messages.push_back(parse_message(place));
  }
  require_input(!chat.messages.empty(), "{}: no messages, expected at least one", list.where());
  if (const auto tools = sorted.is_object() ? top.find("tools") : std::nullopt) {
    for (const JsonPlace& tool : tools->elements()) {
      if (!tool.value().is_object()) {
        tool.refuse("an object that declares a tool");
      }
    }
    chat.tools = tools->elements().empty() ? "" : json.at("tools").dump();
  }
  return chat;
}

std::vector<ChatSegment> render_chat(ChatTemplate chat_template, const Chat& chat, bool thinking) {
  check(!chat.messages.empty(), "a conversation without messages");
  switch (chat_template) {
    case ChatTemplate::kKimiK26:
      return render_kimi(true, chat, thinking);
    case ChatTemplate::kKimiK2:
      return render_kimi(false, chat, thinking);
    case ChatTemplate::kDeepseekV3:
      return render_deepseek(false, chat);
    case ChatTemplate::kDeepseekR1:
      return render_deepseek(true, chat);
  }
  fail("an unknown chat template");
}

std::vector<std::int32_t> encode_chat(const Tokenizer& tokenizer,
                                      const std::vector<ChatSegment>& segments) {
  std::vector<std::int32_t> ids;
  std::string text;
  const auto flush = [&] {
    const std::vector<std::int32_t> encoded = tokenizer.encode(text, /*parse_special=*/false);
    ids.insert(ids.end(), encoded.begin(), encoded.end());
    text.clear();
  };
  for (const ChatSegment& segment : segments) {
    const std::int32_t id =
        segment.special ? tokenizer.find_added(segment.text).value_or(-1) : -1;  // -1: text
    const bool thought = segment.text == kThink || segment.text == kThinkEnd;
    require_input(!segment.special || id >= 0 || thought,
                  "{}: no added token is '{}', which the chat template needs", tokenizer.origin(),
                  segment.text);
    if (id >= 0) {
      flush();
      ids.push_back(id);
    } else {
      text += segment.text;
    }
  }
  flush();
  return ids;
}

}  // namespace kdtree
