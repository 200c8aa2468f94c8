"""
Push a mapper to the Hub, find it by the pair that it is for, and pull exactly what was pushed.

    hf auth login
    python examples/hub_round_trip.py my-mapper me/source-to-target org/source org/target

Any server that speaks the Hub's protocol will do: set HF_ENDPOINT.
"""

import argparse

from hf_kvtransfer import KVMapper, find_mappers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mapper", help="folder")
    parser.add_argument("repo_id")
    parser.add_argument("source", help="Hub id of the source, by which others find the mapper")
    parser.add_argument("target", help="and of the target")
    arguments = parser.parse_args()

    mapper = KVMapper.from_pretrained(arguments.mapper)
    commit = mapper.push_to_hub(arguments.repo_id, base_models=(arguments.source, arguments.target))
    print(f"pushed: {commit.commit_url}")

    for found in find_mappers(arguments.source, arguments.target):
        print(f"found: {found}")

    # A revision pins config, weights and evidence together.
    pulled = KVMapper.from_pretrained(arguments.repo_id, revision=commit.oid)
    same = pulled.digest() == mapper.digest() and pulled.evidence == mapper.evidence
    print(f"pulled at {pulled.revision}: {'the same' if same else 'NOT the same'} weights and evidence")


if __name__ == "__main__":
    main()
