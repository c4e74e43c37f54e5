// SPDX-License-Identifier: GPL-2.0
/* Mapping a Morsel: one entry in the process' page tables, and what happens to it then. */

#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/mman.h>
#include <linux/pfn_t.h>
#include <linux/pkeys.h>
#include <linux/slab.h>

#include "core/pt_pieces.h"
#include "core/pt_secondary.h"
#include "morsel/morsel.h"

/* A mapping of a process. It ends with the VMA that has it. */
struct morsel_mount {
	struct pt_mount	mount;
	struct morsel	*morsel;
	bool		writes;		/* it counts among those who may write */
};

static struct morsel_mount *mount_of(const struct vm_area_struct *vma)
{
	struct pt_mount *mount = vma->vm_private_data;

	return mount ? container_of(mount, struct morsel_mount, mount) : NULL;
}

static struct morsel *morsel_of_vma(const struct vm_area_struct *vma)
{
	return morsel_of(file_inode(vma->vm_file));
}

/*
 * Whether a mapping with these flags shows the reader's tree. A page without tables has an entry of
 * its own in each process.
 */
static bool needs_reader(const struct morsel *morsel, unsigned long flags)
{
	return !(flags & VM_WRITE) && morsel->order;
}

static struct morsel_mount *make_mount(struct morsel *morsel, struct mm_struct *process,
				       bool writes)
{
	struct morsel_mount *mount = kzalloc(sizeof(*mount), GFP_KERNEL_ACCOUNT);

	if (!mount)
		return NULL;
	pt_mount_init(&mount->mount, &morsel->tree);
	mount->mount.reader = morsel->reader;
	mount->morsel = morsel;
	mount->writes = writes;
	pt_mounts_add(&morsel->mounts, &mount->mount, process);
	return mount;
}

static void end_mount(struct morsel_mount *mount)
{
	pt_mounts_remove(&mount->morsel->mounts, &mount->mount);
	if (mount->writes)
		morsel_end_writing(mount->morsel);
	kfree(mount);
}

/* What an error in bringing a page is to who has accessed it. */
static vm_fault_t fault_of(int error)
{
	return error == -ENOMEM ? VM_FAULT_OOM : VM_FAULT_SIGBUS;
}

/*
 * Who may have references to its pages. VFIO takes those that it finds in a VM_PFNMAP without any if
 * they are marked as reserved, which the kernel's for persistent memory are: it must not be one.
 */
static unsigned long rights_to_pin(const struct morsel *morsel)
{
	if (morsel->flags & VELLUM_MORSEL_PINNABLE)
		return VM_MIXEDMAP;
	return VM_IO | (morsel->device ? VM_MIXEDMAP : VM_PFNMAP);
}

static vm_fault_t insert_single(struct vm_fault *vmf, struct page *page)
{
	struct vm_area_struct *vma = vmf->vma;
	unsigned long pfn = page_to_pfn(page);

	if (!(vma->vm_flags & VM_IO))
		return vmf_insert_page(vma, vmf->address, page);
	if (vma->vm_flags & VM_PFNMAP)
		return vmf_insert_pfn(vma, vmf->address, pfn);
	return vmf_insert_mixed(vma, vmf->address, __pfn_to_pfn_t(pfn, PFN_SPECIAL));
}

/*
 * The page of order 0, by an entry of the process' own. Under the mutex that is held while it is
 * taken off and such entries are cleared: none can be made in between.
 */
static vm_fault_t map_single(struct vm_fault *vmf, struct morsel *morsel)
{
	vm_fault_t outcome = VM_FAULT_NOPAGE;
	u64 leaf;

	mutex_lock(&morsel->tables);
	leaf = READ_ONCE(morsel->tree.root[0]);
	if (morsel_is_shown(leaf))
		outcome = insert_single(vmf, pfn_to_page(pt_leaf_pfn(leaf)));
	mutex_unlock(&morsel->tables);
	return outcome;
}

static vm_fault_t fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct morsel_mount *mount = mount_of(vma);
	struct morsel *morsel = morsel_of_vma(vma);
	int error;

	/* A copy that has no mount; or nobody may access it, and the core still tries. */
	if (!mount || !vma_is_accessible(vma))
		return VM_FAULT_SIGSEGV;
	error = morsel_populate(morsel, vmf->pgoff);
	if (!error && needs_reader(morsel, vma->vm_flags))
		error = morsel_show_reader(morsel, vmf->pgoff);
	if (error)
		return fault_of(error);
	return morsel->order ? pt_mount_refault(&mount->mount, vmf) : map_single(vmf, morsel);
}

/* A child's mount, which its first access attaches. NULL: there is no memory for it. */
static struct morsel_mount *inherit(struct morsel_mount *parent, struct mm_struct *process)
{
	struct morsel_mount *child;
	bool writes = parent->writes;
	int error = writes ? morsel_begin_writing(parent->morsel) : 0;

	/* What was revoked is lost to the child as it is to the parent. */
	if (error && error != -EIO)
		return NULL;
	writes &= !error;
	child = make_mount(parent->morsel, process, writes);
	if (!child && writes)
		morsel_end_writing(parent->morsel);
	return child;
}

/*
 * The VMA was copied, by fork or to be moved, and the core is about to copy or to move what the page
 * tables have: nothing. If it leaves them alone in a fork, the parent need not notice.
 */
static void opened(struct vm_area_struct *vma)
{
	struct morsel_mount *mount = mount_of(vma), *child = NULL;
	bool is_child = vma->vm_mm != current->mm;

	if (!mount)
		return;
	if (!is_child || !(vma->vm_flags & VM_WIPEONFORK))
		pt_mount_detach(&mount->mount);
	if (is_child)
		child = inherit(mount, vma->vm_mm);
	vma->vm_private_data = child ? &child->mount : NULL;
}

static void closed(struct vm_area_struct *vma)
{
	struct morsel_mount *mount = mount_of(vma);

	if (!mount)
		return;
	pt_mount_vm_close(vma);
	end_mount(mount);
}

/* Where a reader needs leaves of his own there are some afterwards. */
static int prepare_reader(struct morsel_mount *mount, unsigned long flags)
{
	int error;

	if (!needs_reader(mount->morsel, flags))
		return 0;
	error = morsel_make_reader(mount->morsel);
	mount->mount.reader = mount->morsel->reader;
	return error;
}

/*
 * Secondary MMUs forget the pages, as they have found them with the rights of before. An entry of the
 * process' own goes: one that nobody may access would still be given to a virtual machine.
 */
static void tell(struct vm_area_struct *vma, struct morsel_mount *mount)
{
	if (mount->morsel->order && pt_secondary_can_be_told())
		pt_mount_tell(&mount->mount, vma->vm_mm, 0, mount->morsel->tree.pages);
	else
		unmap_mapping_range(vma->vm_file->f_mapping, 0, 0, 1);
}

/* The next access attaches it again, with the new rights. */
static int protect(struct vm_area_struct *vma, unsigned long start, unsigned long end,
		   unsigned long flags)
{
	struct morsel_mount *mount = mount_of(vma);
	int error;

	if (start != vma->vm_start || end != vma->vm_end || !mount)
		return -EINVAL;
	/* The key would have to be in the leaves, which others share. */
	if (flags & ARCH_VM_PKEY_FLAGS)
		return -EOPNOTSUPP;
	error = prepare_reader(mount, flags);
	if (error)
		return error;
	pt_mount_detach(&mount->mount);
	tell(vma, mount);
	return 0;
}

/* For debuggers: what they cannot get by pinning pages. Bytes of one page at most. */
static int access(struct vm_area_struct *vma, unsigned long addr, void *buffer, int length, int write)
{
	struct morsel *morsel = morsel_of_vma(vma);
	unsigned int offset = offset_in_page(addr);
	struct page *page;

	if (write && !(vma->vm_flags & VM_WRITE))
		return -EFAULT;
	page = morsel_get_page(morsel, (addr - vma->vm_start) >> PAGE_SHIFT);
	if (!page)
		return -EFAULT;
	length = min_t(int, length, PAGE_SIZE - offset);
	if (write)
		memcpy(page_address(page) + offset, buffer, length);
	else
		memcpy(buffer, page_address(page) + offset, length);
	put_page(page);
	return length;
}

static const struct vm_operations_struct operations = {
	.open = opened,
	.close = closed,
	.may_split = pt_mount_vm_may_split,
	.mremap = pt_mount_vm_mremap,
	.mprotect = protect,
	.fault = fault,
	.access = access,
};

static int is_right(const struct morsel *morsel, const struct vm_area_struct *vma)
{
	u64 extent;

	if (!morsel_is_shaped(morsel) || !(vma->vm_flags & VM_MAYSHARE) || vma->vm_pgoff)
		return -EINVAL;
	extent = VELLUM_MORSEL_EXTENT(morsel->order);
	if (vma->vm_end - vma->vm_start != extent || !IS_ALIGNED(vma->vm_start, extent))
		return -EINVAL;
	if (morsel->address && vma->vm_start != morsel->address)
		return -EINVAL;
	return vma->vm_flags & VM_EXEC ? -EACCES : 0;
}

/*
 * Who maps it through a descriptor for writing counts as a writer, also while he only reads. Of what
 * is sealed he gets a mapping for reading, for good.
 */
static int count_writer(struct morsel *morsel, struct vm_area_struct *vma, bool *writes)
{
	int error;

	*writes = vma->vm_flags & VM_MAYWRITE;
	if (!*writes)
		return READ_ONCE(morsel->is_revoked) ? -EIO : 0;
	error = morsel_begin_writing(morsel);
	if (error == -EPERM && !(vma->vm_flags & VM_WRITE)) {
		pt_vma_change_flags(vma, 0, VM_MAYWRITE);
		*writes = false;
		error = 0;
	}
	return error;
}

static int mount_it(struct morsel_mount *mount, struct vm_area_struct *vma)
{
	int error;

	if (!mount->morsel->order) {
		vma->vm_private_data = &mount->mount;
		return 0;
	}
	error = prepare_reader(mount, vma->vm_flags);
	return error ? error : pt_mount_create(&mount->mount, vma);
}

int morsel_map(struct file *file, struct vm_area_struct *vma)
{
	struct morsel *morsel = morsel_of(file_inode(file));
	unsigned long flags = VM_DONTEXPAND | VM_DONTDUMP | VM_NOHUGEPAGE;
	struct morsel_mount *mount;
	bool writes;
	int error;

	error = is_right(morsel, vma);
	if (!error)
		error = count_writer(morsel, vma, &writes);
	if (error)
		return error;
	mount = make_mount(morsel, vma->vm_mm, writes);
	if (!mount) {
		if (writes)
			morsel_end_writing(morsel);
		return -ENOMEM;
	}
	flags |= rights_to_pin(morsel);
	flags |= morsel->flags & VELLUM_MORSEL_INHERIT ? VM_WIPEONFORK : VM_DONTCOPY;
	pt_vma_change_flags(vma, flags, VM_MAYEXEC);
	error = mount_it(mount, vma);
	if (error) {
		end_mount(mount);
		return error;
	}
	vma->vm_ops = &operations;
	return 0;
}

/* The address that it is bound to, if nothing is in the way. The mmap lock is held. */
static unsigned long bound_area(u64 address, unsigned long addr, unsigned long len,
				unsigned long flags)
{
	struct vm_area_struct *vma;

	if (flags & MAP_FIXED)
		return addr == address ? addr : -EINVAL;
	vma = find_vma(current->mm, address);
	return vma && vma->vm_start < address + len ? -EEXIST : address;
}

unsigned long morsel_area(struct file *file, unsigned long addr, unsigned long len,
			  unsigned long pgoff, unsigned long flags)
{
	struct morsel *morsel = morsel_of(file_inode(file));

	if (READ_ONCE(morsel->is_revoked))
		return -EIO;
	if (!morsel_is_shaped(morsel) || pgoff || len != VELLUM_MORSEL_EXTENT(morsel->order))
		return -EINVAL;
	if (morsel->address)
		return bound_area(morsel->address, addr, len, flags);
	if (!morsel->order)
		return pt_get_unmapped_area(file, addr, len, pgoff, flags);
	return pt_pieces_area(file, addr, len, pgoff, flags);
}
