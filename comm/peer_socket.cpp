#include "comm/peer_socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kdtree {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Whether `event` comes within the limit.
bool wait_until_ready(int number, short event, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (true) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    pollfd waiting{number, event, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::max<std::int64_t>(left.count(), 0)));
    if (ready >= 0 || errno != EINTR) {
      return ready > 0;
    }
  }
}

sockaddr_in socket_address(std::uint32_t address, std::uint16_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(port);
  result.sin_addr.s_addr = address;
  return result;
}

Descriptor tcp_socket() {
  return Descriptor(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void send_at_once(const Descriptor& socket) {
  const int on = 1;
  setsockopt(socket.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::vector<std::uint32_t> own_addresses() {
  std::vector<std::uint32_t> addresses;
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) {
    return addresses;
  }
  for (const ifaddrs* one = interfaces; one != nullptr; one = one->ifa_next) {
    const bool usable = one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET &&
                        (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (usable) {
      sockaddr_in address{};
      std::memcpy(&address, one->ifa_addr, sizeof address);
      addresses.push_back(address.sin_addr.s_addr);
    }
  }
  freeifaddrs(interfaces);
  return addresses;
}

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  Descriptor taken(std::move(other));
  std::swap(number_, taken.number_);
  return *this;
}

Descriptor::~Descriptor() {
  if (number_ >= 0) {
    close(number_);
  }
}

void Frame::set_text(const std::string& value) {
  text.fill('\0');
  std::copy_n(value.begin(), std::min(value.size(), text.size() - 1), text.begin());
}

bool Channel::send(const Frame& frame) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&frame);
  std::size_t sent = 0;
  while (open() && sent < sizeof frame) {
    const ssize_t step = ::send(number(), bytes + sent, sizeof frame - sent, MSG_NOSIGNAL);
    if (step > 0) {
      sent += static_cast<std::size_t>(step);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (sent == 0) {
        return true;
      }
      if (!wait_until_ready(number(), POLLOUT, milliseconds(1000))) {
        return false;
      }
    } else if (errno != EINTR) {
      return false;
    }
  }
  return open();
}

Channel::Received Channel::receive(Frame& frame) {
  while (open()) {
    const ssize_t step = recv(number(), buffer_.data() + filled_, buffer_.size() - filled_, 0);
    if (step > 0) {
      filled_ += static_cast<std::size_t>(step);
      if (filled_ == buffer_.size()) {
        std::memcpy(&frame, buffer_.data(), sizeof frame);
        frame.text.back() = '\0';
        filled_ = 0;
        return Received::kFrame;
      }
    } else if (step < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return Received::kNothing;
    } else if (step == 0 || errno != EINTR) {
      return Received::kClosed;
    }
  }
  return Received::kClosed;
}

bool Channel::wait_for(Frame& frame, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (true) {
    const Received received = receive(frame);
    if (received != Received::kNothing) {
      return received == Received::kFrame;
    }
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0 || !wait_until_ready(number(), POLLIN, left)) {
      return false;
    }
  }
}

std::optional<Listener> listen_anywhere() {
  Listener listener{tcp_socket(), 0, own_addresses()};
  sockaddr_in address = socket_address(htonl(INADDR_ANY), 0);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!listener.socket.open() || bind(listener.socket.number(), generic, size) != 0 ||
      listen(listener.socket.number(), SOMAXCONN) != 0 ||
      getsockname(listener.socket.number(), generic, &size) != 0) {
    return std::nullopt;
  }
  listener.port = ntohs(address.sin_port);
  return listener;
}

Channel accept_channel(const Listener& listener) {
  Descriptor socket(
      accept4(listener.socket.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  send_at_once(socket);
  return Channel(std::move(socket));
}

Channel connect_channel(std::uint32_t address, std::uint16_t port, milliseconds limit) {
  Descriptor socket = tcp_socket();
  const sockaddr_in target = socket_address(address, port);
  const int status =
      connect(socket.number(), reinterpret_cast<const sockaddr*>(&target), sizeof target);
  if (status != 0 && errno != EINPROGRESS && errno != EINTR) {
    return {};
  }
  int error = 0;
  socklen_t size = sizeof error;
  if (!wait_until_ready(socket.number(), POLLOUT, limit) ||
      getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
    return {};
  }
  send_at_once(socket);
  return Channel(std::move(socket));
}

}  // namespace kdtree
