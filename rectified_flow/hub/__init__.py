"""Models outside of the run that trained them: a folder or a repository with a model card, and a diffusers pipeline."""

from rectified_flow.hub.card import CardContents as CardContents
from rectified_flow.hub.card import card_of_run as card_of_run
from rectified_flow.hub.card import model_card as model_card
from rectified_flow.hub.pretrained import claim_model as claim_model
from rectified_flow.hub.pretrained import load_pretrained as load_pretrained
from rectified_flow.hub.pretrained import push_to_hub as push_to_hub
from rectified_flow.hub.pretrained import save_pretrained as save_pretrained
