"""A small retail desk: a scripted customer, orders, and tools that an agent calls in plain text."""

import random

from ..fidelity.chat import Message


_ITEMS = ("a desk lamp", "a kettle", "hiking boots", "a rain jacket", "a chess set", "a bread knife", "two mugs")
_NAMES = ("Ada", "Bruno", "Chidi", "Dalia", "Emre", "Freya", "Goro")
_RETURN_DAYS = 30
# Commands that make no sense before the customer leaves.
_PATIENCE = 4
POLICY = f"""You work at the desk of a small shop. Reply with one command on one line, nothing else:
LOOKUP <order> shows an order.
RETURN <order> takes back an order that was delivered up to {_RETURN_DAYS} days ago.
CANCEL <order> cancels an order that is not yet shipped.
SAY <text> speaks to the customer.
DONE ends the conversation, when the customer's wish is settled, or cannot be granted.
Look an order up before you change it, and change nothing that these rules do not allow."""


class RetailDesk:
    """
    A customer who wants to return or cancel an order, or asks how it stands.

    The customer tells the order's number when first spoken to. The score is 1 if in the end the orders are as the
    shop's rules have them, and the agent has looked at the customer's and, if that was the wish, has said how it
    stands; else 0, also as long as the conversation goes on.

    Args:
        seed (`int`):
            Another one is another customer with another wish.
    """

    def __init__(self, seed: int):
        generator = random.Random(seed)
        self.customer = generator.choice(_NAMES)
        numbers = generator.sample(range(100, 1000), 3)
        self.order = numbers[0]
        self.orders = {
            number: {
                "customer": self.customer if number == self.order else generator.choice(_NAMES),
                "item": generator.choice(_ITEMS),
                "status": generator.choice(("processing", "shipped", "delivered")),
                "days": generator.randrange(1, 2 * _RETURN_DAYS),
            }
            for number in numbers
        }
        self.wish = generator.choice(("return", "cancel", "ask"))
        self._expected = {number: str(order["status"]) for number, order in self.orders.items()}
        if self.wish != "ask" and self._is_allowed(self.wish, self.order):
            self._expected[self.order] = {"return": "returned", "cancel": "cancelled"}[self.wish]
        item = self.orders[self.order]["item"]
        opening = {
            "return": f"I would like to return {item}.",
            "cancel": f"Please cancel my order of {item}.",
            "ask": f"How does my order of {item} stand?",
        }[self.wish]
        self._messages: list[Message] = [
            {"role": "system", "content": POLICY},
            {"role": "user", "content": f"Hello, I am {self.customer}. {opening}"},
        ]
        self._is_told_number = self._is_looked_up = self._is_answered = self._done = False
        self._mistakes = 0

    @property
    def done(self) -> bool:
        return self._done

    @property
    def score(self) -> float:
        statuses = {number: order["status"] for number, order in self.orders.items()}
        is_answered = self._is_looked_up and (self.wish != "ask" or self._is_answered)
        return float(self._done and self._mistakes < _PATIENCE and statuses == self._expected and is_answered)

    def observe(self) -> list[Message]:
        return [dict(message) for message in self._messages]

    def act(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})
        line = next((line.strip() for line in text.splitlines() if line.strip()), "")
        command, _, argument = line.partition(" ")
        if command == "DONE":
            self._done = True
        elif command == "SAY" and argument.strip():
            self._messages.append({"role": "user", "content": self._answer(argument)})
        elif command in ("LOOKUP", "RETURN", "CANCEL") and argument.strip().isdecimal():
            self._messages.append({"role": "tool", "content": self._call(command, int(argument))})
        else:
            self._mistakes += 1
            self._done = self._mistakes >= _PATIENCE
            answer = f"There is no command {line[:40]!r}. Use LOOKUP, RETURN, CANCEL, SAY or DONE."
            self._messages.append({"role": "tool", "content": answer})

    def _answer(self, said: str) -> str:
        if str(self.orders[self.order]["status"]) in said.lower():
            self._is_answered = True
        if not self._is_told_number:
            self._is_told_number = True
            return f"It is order {self.order}."
        return "Thank you." if self._is_answered or self.wish != "ask" else "And how does it stand?"

    def _call(self, command: str, number: int) -> str:
        if number not in self.orders:
            return f"There is no order {number}."
        order = self.orders[number]
        if command == "LOOKUP":
            self._is_looked_up |= number == self.order
            age = f", {order['days']} days ago" if order["status"] == "delivered" else ""
            return f"Order {number}: {order['item']} for {order['customer']}, {order['status']}{age}."
        wish = command.lower()
        # The tools do what they are told to: keeping the rules is the agent's job.
        order["status"] = {"return": "returned", "cancel": "cancelled"}[wish]
        return f"Order {number} is {order['status']}."

    def _is_allowed(self, wish: str, number: int) -> bool:
        order = self.orders[number]
        if wish == "return":
            return order["status"] == "delivered" and int(order["days"]) <= _RETURN_DAYS
        return order["status"] == "processing"
