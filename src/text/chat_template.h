// Conversations as prompts: the chat templates of DeepSeek and Kimi, rendered in code.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace kdtree {

enum class ChatTemplate : std::uint8_t {
  kKimiK26,  // K2.5 and K2.6
  kKimiK2,   // K2-Instruct
  kDeepseekV3,
  kDeepseekR1,  // DeepSeek-V3's with "<think>" and a line end behind the last header
};
// Of "kimi-k2.6", "kimi-k2", "deepseek-v3", "deepseek-r1"; none for any other name.
std::optional<ChatTemplate> find_chat_template(std::string_view name);

enum class ChatRole : std::uint8_t { kSystem, kUser, kAssistant, kTool };

struct ChatToolCall {
  std::string id;
  std::string type;  // "function"
  std::string name;
  std::string arguments;  // JSON as the model wrote it
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string role_name;               // as written: "user"
  std::string name;                    // may be empty
  std::optional<std::string> content;  // absent only where there are tool calls
  std::string reasoning_content;
  std::vector<ChatToolCall> tool_calls;  // kAssistant only
  std::string tool_call_id;              // kTool only
};

struct Chat {
  std::vector<ChatMessage> messages;  // at least one
  // The declared ones: compact JSON, keys in the order of the file; may be empty.
  std::string tools;
  std::string origin;  // where it comes from, for errors
};

// A conversation {"messages": [...], "tools": [...]}, or a bare list of messages, as OpenAI's
// interface has them; contents are strings, and `tools` may be absent. InputError names file, key
// and value: no messages, an unknown role, a missing content, tools that are no list of objects.
Chat parse_chat(const nlohmann::ordered_json& json, const std::string& origin);

// A piece of a prompt: a control token of the template (`special`), or text in which nothing is a
// control token, whatever it looks like.
struct ChatSegment {
  std::string text;
  bool special = false;
  bool operator==(const ChatSegment&) const = default;
};

// The prompt of a conversation up to where the assistant answers. `thinking` counts for kKimiK26
// only. Joined, the segments are what the published template renders, for kDeepseekV3 with its
// habits in rows of tool calls (only the second and later calls of a message close the section).
// No two neighbours are both text. InputError for tools with DeepSeek, whose templates declare
// none.
std::vector<ChatSegment> render_chat(ChatTemplate chat_template, const Chat& chat, bool thinking);

// The ids of the segments. They differ from the published encode of the joined text where a message
// holds the text of an added token (there it becomes that token, here it stays text), and for Kimi
// where a text is so long that it is cut (long_text.h): there the cuts count from the front of the
// prompt, here from that of the segment. InputError, naming the tokenizer, for a control token that
// it does not have; "<think>" is text then.
std::vector<std::int32_t> encode_chat(const Tokenizer& tokenizer,
                                      const std::vector<ChatSegment>& segments);

}  // namespace kdtree
