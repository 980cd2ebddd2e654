from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("gpt2")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=8)
trainer = Trainer(model=model, args=args, train_dataset=load_dataset("wikitext")["train"])
trainer.train()
