// SPDX-License-Identifier: GPL-2.0
/*
 * Slots: the names, rights and shapes of a device's Morsels. Changes of a name are made under the
 * directory's lock, all others under the Morsel's mutex `state`.
 */

#include "morsel/device.h"
#include "morsel/morsel.h"

static u64 morsel_slot_take(struct morsel_device *device)
{
	u64 index;

	spin_lock(&device->lock);
	index = find_first_zero_bit(device->named, device->super->slots);
	if (index < device->super->slots)
		__set_bit(index, device->named);
	spin_unlock(&device->lock);
	return index;
}

/* Makes the slot of a new file. NULL: there is none left. */
struct morsel_slot *morsel_slot_make(struct morsel_device *device, const struct inode *inode,
				     const char *name)
{
	u64 index = morsel_slot_take(device);
	struct morsel_slot *slot = device->slots + index;

	if (index >= device->super->slots)
		return NULL;
	*slot = (struct morsel_slot){
		.mode = inode->i_mode,
		.uid = i_uid_read(inode),
		.gid = i_gid_read(inode),
	};
	strscpy(slot->name, name, sizeof(slot->name));
	morsel_persist(slot, sizeof(*slot));
	WRITE_ONCE(slot->is_used, 1);
	morsel_persist(&slot->is_used, sizeof(slot->is_used));
	return slot;
}

void morsel_slot_erase(struct morsel_device *device, struct morsel_slot *slot)
{
	WRITE_ONCE(slot->is_used, 0);
	morsel_persist(&slot->is_used, sizeof(slot->is_used));
	spin_lock(&device->lock);
	__clear_bit(slot - device->slots, device->named);
	spin_unlock(&device->lock);
}

void morsel_slot_set_shape(struct morsel_device *device, struct morsel_slot *slot,
			   const struct morsel *morsel)
{
	slot->order = morsel->order;
	slot->length = morsel->length;
	slot->flags = morsel->flags;
	slot->address = morsel->address;
	morsel_persist(slot, sizeof(*slot));
	WRITE_ONCE(slot->root, morsel_device_index(device, __pa(morsel->tree.root)));
	morsel_persist(&slot->root, sizeof(slot->root));
}

/*
 * A crash in between may leave the new rights with the old owner. Each of the two was an owner's
 * choice.
 */
void morsel_slot_set_owner(struct morsel_slot *slot, const struct inode *inode)
{
	slot->mode = inode->i_mode;
	slot->uid = i_uid_read(inode);
	slot->gid = i_gid_read(inode);
	morsel_persist(slot, sizeof(*slot));
}

void morsel_slot_set_seals(struct morsel_slot *slot, u64 seals)
{
	WRITE_ONCE(slot->seals, seals);
	morsel_persist(&slot->seals, sizeof(slot->seals));
}
