/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Persistent memory under a file system. The machine finds it again after it went down in any way.
 *
 *	page 0			the identity and the place of the device (struct morsel_super)
 *	page 1			the guard of trees of order 3
 *	pages 2 ...		slots: a Morsel's name, rights and shape, and its first table
 *	all others		tables and data
 *
 * The tables on the device are those that the CPU walks. One entry mounts a Morsel right after a
 * restart, and nothing is rebuilt.
 *
 * The device has no record of free pages. A page is used if a table that can be reached from a slot
 * says so. Mounting the device reads all tables, which are a 512th of its pages. So the device has
 * no two records that have to agree. An entry, and the first word of a slot, have 8 bytes each,
 * which are written as a whole or not at all. They are written only when all that they refer to is
 * durable. A page that was taken and that nothing refers to yet is free again after a crash.
 *
 * CPUs see a page only when all entries that lead to it are durable, its own included. Otherwise a
 * program could store to the page, write the store back, tell the world, and lose the page with the
 * power. So a leaf is first made durable without PRESENT. Recovery takes the page for used in both
 * states.
 */
#ifndef VELLUM_MORSEL_DEVICE_H
#define VELLUM_MORSEL_DEVICE_H

#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/types.h>
#include <vellum/morsel.h>

#include "core/compat.h"
#include "core/pt_tree.h"

#define MORSEL_DEVICE_MAGIC	0x4c4553524f4d4c56ULL	/* "VLMORSEL" */
#define MORSEL_DEVICE_VERSION	1

struct morsel_super {
	u64	magic;
	u64	version;
	u64	pages;		/* number of pages of the device */
	u64	slots;
	u64	address;	/* physical, of page 0: entries are physical addresses */
};

struct morsel_slot {
	u64	is_used;	/* 1; written last. 0: the rest is void */
	u64	root;		/* page of the first table; written after the rest. 0: no shape */
	u32	order, mode, uid, gid;
	u64	length, flags, address, seals;
	char	name[256];	/* ends with a zero */
	u8	reserved[184];
};

struct dax_device;
struct dev_pagemap;

struct morsel_device {
	struct pt_source	source;
	struct vellum_bdev		*bdev;
	struct dax_device	*dax;
	struct dev_pagemap	*descriptors;	/* of its pages, which stay meanwhile */
	void			*start;
	struct morsel_super	*super;
	struct morsel_slot	*slots;
	u64			pages, first;	/* `first` is the first page for tables and data */

	spinlock_t		lock;		/* protects all below */
	unsigned long		*used;		/* a bit a page */
	unsigned long		*named;		/* a bit a slot */
	u64			next;		/* where the search for a free page begins */
	/*
	 * Pages that were given back while something still had references to them. They wait for
	 * that.
	 */
	unsigned long		*held;
	u64			held_count;
};

/* device.c */
struct morsel_device *morsel_device_open(const char *path, bool format);
void morsel_device_close(struct morsel_device *device);
/* Takes a page of zeros, durably; NULL: there is none. */
struct page *morsel_device_take(struct morsel_device *device);
/*
 * Gives a page back. No durable entry leads to it. The page waits for holders of references, and
 * the caller does not.
 */
void morsel_device_give(struct morsel_device *device, struct page *page);
/* Claims the page for tables and data. False: it is not for these, or is claimed. */
bool morsel_device_claim(struct morsel_device *device, u64 index);
u64 morsel_device_used(struct morsel_device *device);
void morsel_persist(const void *address, size_t length);

static inline void *morsel_device_page(const struct morsel_device *device, u64 index)
{
	return device->start + (index << PAGE_SHIFT);
}

static inline u64 morsel_device_index(const struct morsel_device *device, pteval_t entry)
{
	return ((entry & PTE_PFN_MASK) - device->super->address) >> PAGE_SHIFT;
}

/* slots.c */
struct morsel;

struct morsel_slot *morsel_slot_make(struct morsel_device *device, const struct inode *inode,
				     const char *name);
void morsel_slot_erase(struct morsel_device *device, struct morsel_slot *slot);
void morsel_slot_set_shape(struct morsel_device *device, struct morsel_slot *slot,
			   const struct morsel *morsel);
void morsel_slot_set_owner(struct morsel_slot *slot, const struct inode *inode);
void morsel_slot_set_seals(struct morsel_slot *slot, u64 seals);

/* recover.c */
/* Finds the used pages, and sets tables up for the kernel. EUCLEAN: the device is damaged. */
int morsel_device_recover(struct morsel_device *device);
/* Makes tables ordinary pages again. */
void morsel_device_forget_tables(struct morsel_device *device, struct morsel_slot *slot);

#endif /* VELLUM_MORSEL_DEVICE_H */
